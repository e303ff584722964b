"""Stages of a long job, each a process of its own with a deadline: the others still run after one that fails."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

Status = Literal["ok", "failed", "skipped"]

MIN_SECONDS = 5.0  # seconds; with less left, a stage is not started
GRACE_SECONDS = 10.0  # seconds that an interrupted stage has to write what it has
TAIL_CHARACTERS = 2000  # characters of output that are kept of a failure


@dataclass(frozen=True, slots=True)
class GpuStage:
    """``arguments`` are Python's. ``needs``: stages that must have succeeded; ``uses``: stages whose results it takes
    where there are any; ``packages``: what must be installed. ``reserved``: the stages before it leave it its time.
    ``writes``: files besides ``NAME.json``."""

    name: str
    arguments: tuple[str, ...]
    deadline: float  # seconds
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    reserved: bool = False
    writes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return (f"{self.name}.json", *self.writes)


class StageOutcome(NamedTuple):
    name: str
    status: Status
    seconds: float
    error: str = ""


def run_all(
    stages: Sequence[GpuStage],
    *,
    budget: float,
    run: Callable[[GpuStage, float], StageOutcome],
    now: Callable[[], float] = time.monotonic,
) -> Iterator[StageOutcome]:
    """Run the stages in order, within ``budget`` seconds together. ``run`` gets the stage and its seconds, which are
    fewer than its deadline where the budget, without what is reserved for later stages, leaves no more."""
    end = now() + budget
    done: dict[str, StageOutcome] = {}
    for place, stage in enumerate(stages):
        reserved = sum(later.deadline for later in stages[place + 1 :] if later.reserved)
        rest = end - now() - reserved
        why = _obstacle(stage, done) or ("no time left" if rest < MIN_SECONDS else "")
        outcome = (
            StageOutcome(stage.name, "skipped", 0.0, why) if why else run(stage, min(stage.deadline, rest))
        )
        done[stage.name] = outcome
        yield outcome


def select_stages(stages: Sequence[GpuStage], prefixes: Sequence[str]) -> list[GpuStage]:
    """The stages whose names begin with a prefix, and those that they need or use, in their order."""
    wanted: set[str] = set()
    for stage in reversed(stages):  # what a stage needs comes before it
        if stage.name in wanted or stage.name.startswith(tuple(prefixes)):
            wanted |= {stage.name, *stage.needs, *stage.uses}
    return [stage for stage in stages if stage.name in wanted]


def _obstacle(stage: GpuStage, done: Mapping[str, StageOutcome]) -> str:
    unmet = [name for name in stage.needs if name not in done or done[name].status != "ok"]
    if unmet:
        return f"needs {', '.join(unmet)}"
    missing = absent(stage)
    return f"not installed: {', '.join(missing)}" if missing else ""


def absent(stage: GpuStage) -> list[str]:
    """The packages that the stage needs and that are not installed."""
    return [name for name in stage.packages if importlib.util.find_spec(name) is None]


def in_process(python: str, folder: Path) -> Callable[[GpuStage, float], StageOutcome]:
    """A function that runs a stage with that Python; the output goes to ``NAME.log`` in the folder."""

    def run(stage: GpuStage, seconds: float) -> StageOutcome:
        begin = time.monotonic()
        path = folder / f"{stage.name}.log"
        with path.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [python, *stage.arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **stage.environment},
                start_new_session=True,
            )
            error = _waited(process, seconds)
        took = time.monotonic() - begin
        if error:
            # The first line has the last one of the output, which names a traceback's error.
            tail = path.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARACTERS:].strip()
            whole = f"{error}: {tail.splitlines()[-1]}\n{tail}" if tail else error
            return StageOutcome(stage.name, "failed", took, whole)
        return StageOutcome(stage.name, "ok", took)

    return run


def _waited(process: subprocess.Popen[bytes], seconds: float) -> str:
    """What went wrong, empty if nothing. A process that is late is interrupted, and ended with all that it started."""
    try:
        code = process.wait(seconds)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        _end(process)
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"not done after {seconds:.0f} s"
    return f"exit code {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGINT)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
