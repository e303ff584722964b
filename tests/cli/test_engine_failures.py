"""Sources of errors in an engine, as a user meets them: one sentence, exit code 3 or 4, and no process left."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schedbench.profiles.engines import client
from tests.conftest import RunCommand
from tests.profiles.engines.checkouts import checkout, git, write_package
from tests.profiles.engines.conftest import ADAPTER, QUIET, SMALL, Scripted, scripted

pytestmark = pytest.mark.wide

__all__ = ["scripted"]  # a fixture

TINY = tuple(part for override in SMALL for part in ("--set", override))
SLEEPER = "sleep 65431"
STARTS_SLEEPER = f"import os, subprocess; subprocess.Popen({SLEEPER.split()})\n"


def left() -> str:
    """The processes that scripts have started and that are still there."""
    found = subprocess.run(["pgrep", "-f", f"^{SLEEPER}$"], capture_output=True, text=True, check=False)
    return found.stdout


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    yield
    client.end_engines()
    deadline = time.monotonic() + 30
    while left():
        assert time.monotonic() < deadline, left()
        time.sleep(0.05)


def no_folder(at: Path) -> tuple[str, ...]:
    return (f"{ADAPTER}:{at}/gone",)


def no_package(at: Path) -> tuple[str, ...]:
    return (f"{ADAPTER}:{at}",)


def no_such_ref(at: Path) -> tuple[str, ...]:
    checkout(at, QUIET)
    return (f"{ADAPTER}:{at}@gone",)


def no_repository(at: Path) -> tuple[str, ...]:
    write_package(at / "python/toy", QUIET)
    return (f"{ADAPTER}:{at}@main",)


def commit_without_package(at: Path) -> tuple[str, ...]:
    checkout(at, QUIET)
    git(at, "rm", "-q", "-r", "python")
    git(at, "commit", "-q", "-m", "without")
    return (f"{ADAPTER}:{at}@main",)


def no_wheel(at: Path) -> tuple[str, ...]:
    return ("sglang==9", "--engine-wheels", str(at))


def broken_wheel(at: Path) -> tuple[str, ...]:
    (at / "sglang-9-py3-none-any.whl").write_text("<html>")
    return ("sglang==9", "--engine-wheels", str(at))


def no_interpreter(at: Path) -> tuple[str, ...]:
    write_package(at / "toy", QUIET)
    return (f"{ADAPTER}:{at}", "--engine-python", f"{at}/python")


def no_python(at: Path) -> tuple[str, ...]:
    write_package(at / "toy", QUIET)
    return (f"{ADAPTER}:{at}", "--engine-python", "/bin/false")


def broken_adapter(at: Path) -> tuple[str, ...]:
    (at / "mine.py").write_text("import gone")
    return (f"{at}/mine.py:{at}",)


def changed_adapter(at: Path, old: str, new: str) -> tuple[str, ...]:
    write_package(at / "toy", QUIET)
    text = ADAPTER.read_text()
    assert old in text
    (at / "changed.py").write_text(text.replace(old, new))
    return (f"{at}/changed.py:{at}",)


def missing_dependency(at: Path) -> tuple[str, ...]:
    return changed_adapter(at, "str] = {}", "str] = {'not_installed': 'not-installed==1'}")


def other_package(at: Path) -> tuple[str, ...]:
    return changed_adapter(at, "import toy.loop", "import json as toy; toy.loop = None")


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        (no_folder, 3, "gone is no folder"),
        (no_package, 3, "no python/toy and no toy in that folder"),
        (no_such_ref, 3, "@gone: no such commit, branch or tag"),
        (no_repository, 3, "no git checkout: leave out @main"),
        (commit_without_package, 3, "the commit has no python/toy and no toy"),
        (no_wheel, 3, "pip download --no-deps sglang==9"),
        (broken_wheel, 3, "is no whl file: fetch it again"),
        (broken_adapter, 3, "No module named 'gone'"),
        (no_interpreter, 3, "no Python interpreter"),
        (no_python, 3, "no Python interpreter: /bin/false, which exited with 1"),
        pytest.param(missing_dependency, 3, "lacks not_installed; this line makes", marks=pytest.mark.wide),
        pytest.param(other_package, 3, "not from its source", marks=pytest.mark.wide),
    ],
)
def test_a_source_that_cannot_run_is_refused(
    run_command: RunCommand, tmp_path: Path, source: Callable[[Path], tuple[str, ...]], code: int, says: str
) -> None:
    said = run_command("run", "mixed", *TINY, "--engine", *source(tmp_path))
    assert (said.code, said.out) == (code, "")
    assert says in " ".join(said.err.split())


@pytest.mark.wide
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ImportError('needs a GPU')", "its import failed: ImportError: needs a GPU"),
        ("import os; os._exit(7)", "its import did not end: the engine's process exited with 7"),
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
        (
            "raise ValueError('bad batch')",
            4,
            "the run failed: ValueError: bad batch (at python/toy/script.py:2)",
        ),
        ("step = lambda: step()\nstep()", 4, "the run failed: RecursionError"),
        ("exit(2)", 4, "the run failed: exited with 2"),
        ("import gone", 4, "the run failed: ModuleNotFoundError: No module named 'gone'"),
        ("input()", 4, "the run failed: EOFError"),
        (
            "import torch; torch.zeros(1, device='cuda:1')",
            4,
            "the run failed: RuntimeError: invalid device ordinal",
        ),
        ("import torch; torch.zeros(1, device='xpu')", 4, "the run failed: "),
        ("os._exit(0)", 4, "the run did not end: its process exited with 0"),
        ("os.execv('/bin/true', ['true'])", 4, "the run did not end: its process exited with 0"),
        ("os.kill(os.getpid(), 11)", 4, "the run did not end: its process was ended by SIGSEGV"),
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
