"""A toy engine whose scheduler is ours, with a step of its own before it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from schedbench.cli.result_page import page
from schedbench.profiles.engines import client
from schedbench.profiles.engines.client import opened_engine
from schedbench.profiles.engines.failures import Answer
from schedbench.profiles.engines.process import EnginePipes
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.resolve import Resolved, ask
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import HazardFinding, Hazards, Result
from tests.cli.pages import printed

from .checkouts import write_package

ADAPTER = Path(__file__).parent / "toy_adapter.py"
QUIET = "def step(device):\n    pass\n"
SCRIPTED = """
from pathlib import Path
SCRIPT = Path(__file__).with_name("script.py")
def step(device):
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), {"device": device, "rank": rank})
"""
SMALL = (
    "model.preset=tiny-deep",
    "device.values=none",
    "workload.requests=2",
    "workload.prompt_tokens={dist: uniform, min: 4, max: 8}",
    "workload.output_tokens={dist: uniform, min: 2, max: 3}",
    "measure.warmup_requests=0",
    "expect={}",
)
SLEEP = f"sleep {10**9 + os.getpid()}"  # which nothing else on this machine runs, such as the same tests beside these
PYTHON = os.environ.get("SCHEDBENCH_ENGINE_PYTHON", sys.executable)  # has what a given engine needs
WriteEngine = Callable[..., str]
Scripted = Callable[[str], str]


@pytest.fixture(autouse=True, scope="module")
def engines_of_one_file() -> Iterator[None]:
    """No process of an engine outlives the tests of a file."""
    yield
    client.end_engines()


@pytest.fixture(scope="session")
def question() -> Resolved:
    return ask("mixed", SMALL)


@pytest.fixture
def toy(tmp_path: Path) -> WriteEngine:
    """Returns a function that writes the toy engine with the given ``toy/loop.py`` into a folder and returns the
    engine's name."""

    def write(text: str = QUIET, *, folder: str = "toy-engine") -> str:
        write_package(tmp_path / folder / "python" / "toy", dedent(text))
        return f"{ADAPTER}:{tmp_path / folder}"

    return write


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    """Gives a toy engine, which is imported once for all tests of a file, another script that its step runs."""
    package = tmp_path_factory.mktemp("scripted") / "python" / "toy"
    write_package(package, SCRIPTED)

    def write(text: str) -> str:
        (package / "script.py").write_text(dedent(text))
        return f"{ADAPTER}:{package.parents[1]}"

    return write


def run(question: Resolved, engine: str, *, python: str = sys.executable) -> Result:
    asked = replace(question, engine=EngineChoice(engine, python))
    return execute(asked, Options(save_tokens=True))


def run_given(
    engine: EngineChoice | None, *overrides: str, scenario: str = "mixed", **options: Any
) -> Result:
    """Run the engine, or our scheduler, on the virtual GPU. The page of the result can be shown."""
    question = replace(ask(scenario, overrides), engine=engine)
    result = execute(question, Options(device="vgpu", **options))
    assert printed(page(result.document(), 80), 80)
    return result


def findings(result: Result) -> Sequence[HazardFinding]:
    """The hazards of a run that was watched for them."""
    assert isinstance(result.hazards, Hazards)
    return result.hazards.findings


def sleepers() -> list[str]:
    """Returns the processes that run SLEEP."""
    found = subprocess.run(["pgrep", "-f", f"^{SLEEP}$"], capture_output=True, text=True, check=False)
    return found.stdout.split()


def end_once_it_hangs(
    patch: pytest.MonkeyPatch, engine: str, seconds: float, hangs: Callable[[], object]
) -> None:
    """The engine's next run has that time-out from the moment on at which it hangs, however long it takes until
    then."""
    process, answer = opened_engine(EngineChoice(engine)), EnginePipes.next
    process.start()

    def next_answer(pipes: EnginePipes, patience: float) -> Answer | None:
        while not hangs():
            with suppress(TimeoutError):
                return answer(pipes, 0)
        return answer(pipes, patience)

    patch.setattr(process, "timeout", seconds)
    patch.setattr(EnginePipes, "next", next_answer)


def wait_until(
    happened: Callable[[], object], *, seconds: float = 600, of: subprocess.Popen[Any] | None = None
) -> None:
    """Waits for what happens while the program ``of`` runs, where there is one."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        assert of is None or of.poll() is None
        time.sleep(0.01)


def interrupt_when(happened: Callable[[], object]) -> None:
    """Sends this process SIGINT at that moment, from a thread."""

    def interrupt() -> None:
        wait_until(happened)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
