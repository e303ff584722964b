"""Errors of an engine as a user meets them: one sentence, exit code 3 or 4, and no process left. test_source.py and
test_processes.py have the sentence of every source that cannot run, and of more failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from schedbench.profiles.engines import client
from tests.conftest import RunCommand
from tests.profiles.engines.checkouts import write_package
from tests.profiles.engines.conftest import (
    ADAPTER,
    QUIET,
    SLEEP,
    SMALL,
    Scripted,
    scripted,
    sleepers,
    wait_until,
)

pytestmark = pytest.mark.wide

__all__ = ["scripted"]  # a fixture

TINY = tuple(part for override in SMALL for part in ("--set", override))
STARTS_SLEEPER = f"import os, subprocess; subprocess.Popen({SLEEP.split()})\n"


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    yield
    client.end_engines()
    wait_until(lambda: not sleepers())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import os; os.kill(os.getpid(), 9)", "its import did not end: the engine's process was ended by"),
        ("import os; os.fork() or os._exit(0); raise OSError('bad')", "its import failed: OSError: bad"),
        (
            "import time; time.sleep(1000)",
            "its import took longer than 1 s (--engine-timeout), and was ended",
        ),
    ],
)
def test_an_engine_that_cannot_be_imported_is_an_error_of_its_own(
    run_command: RunCommand, tmp_path: Path, text: str, says: str
) -> None:
    timeout = ("--engine-timeout", "1") if "sleep" in text else ()
    write_package(tmp_path / "toy", f"{STARTS_SLEEPER}{text}\n{QUIET}")
    said = run_command("run", "mixed", *TINY, "--engine", f"{ADAPTER}:{tmp_path}", *timeout)
    assert said.code == 4
    assert says in " ".join(said.err.split())


NAMES = "schedbench.profiles.engines.names"


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("step = lambda: step()\nstep()", 4, "the run failed: RecursionError"),
        ("import torch; torch.zeros(1, device='xpu')", 4, "the run failed: "),
        ("os.execv('/bin/true', ['true'])", 4, "the run did not end: its process exited with 0"),
        (
            "import signal; signal.alarm(1); signal.pause()",
            4,
            "the run did not end: its process was ended by SIGALRM",
        ),
        ("os.closerange(3, 99)", 4, "the run did not end: its process exited with "),
        (f"from {NAMES} import EngineError; raise EngineError('no such mode')", 3, "no such mode"),
    ],
)
def test_an_engine_that_fails_in_its_loop_is_an_error_of_its_own(
    run_command: RunCommand, scripted: Scripted, text: str, code: int, says: str
) -> None:
    said = run_command("run", "mixed", *TINY, "--engine", scripted(f"{STARTS_SLEEPER}{text}"))
    assert said.code == code
    assert says in " ".join(said.err.split())


@pytest.mark.parametrize(
    "text",
    [
        "print('{\"ended\": 0}', flush=True); os.write(1, b'noise')",
        "child = os.fork()\nif child:\n    os.waitpid(child, 0)",
        "import sys; sys.stdout.close()",
        "import threading; threading.Thread(target=lambda: None).start()",
        "os.chdir('/')",
    ],
    ids=["stdout", "fork", "closed stdout", "thread", "folder"],
)
def test_what_an_engine_does_beside_its_loop_changes_no_answer(
    run_command: RunCommand, scripted: Scripted, text: str
) -> None:
    said = run_command(
        "run", "mixed", *TINY, "--engine", scripted(f"{STARTS_SLEEPER}{text}"), "--format", "md"
    )
    assert said.code == 0
    assert "toy_adapter 1.0" in said.out
    assert "noise" not in said.out
    assert ('printed:\n{"ended": 0}\nnoise' in said.err) == ("noise" in text)
