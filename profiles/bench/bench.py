"""The cost of the tool itself: figures with their units and aims.

The figures are wall-clock times of this machine, and depend on its load.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...scenarios.loader import load
from ...scenarios.schema import Scenario
from ...sched.observe import Observer, StepInfo
from ..platform.resolve import resolve
from ..ranks.execute import Options, execute
from . import host as bench_host
from . import vgpu as bench_vgpu

_TEN_LINES = """
import typer
app = typer.Typer()
@app.command()
def a(): ...
@app.command()
def b(): ...
app(["--help"])
"""


class BenchFigure(NamedTuple):
    """``lower``: whether values below the aim meet it."""

    name: str
    value: float
    unit: str
    aim: float | None = None
    lower: bool = True

    @property
    def met(self) -> bool | None:
        if self.aim is None:
            return None
        return self.value <= self.aim if self.lower else self.value >= self.aim


def conclusion(rows: Sequence[BenchFigure]) -> str:
    """Return how many aims are met, and which figures miss theirs."""
    aims = [row for row in rows if row.met is not None]
    missed = [row.name for row in aims if not row.met]
    which = f"; missed: {'; '.join(missed)}" if missed else ""
    return f"{len(aims) - len(missed)} of {len(aims)} aims are met{which}."


Stage = Callable[[], Iterator[BenchFigure]]


def stages(trace: Path | None) -> Sequence[Stage]:
    """What to measure, the quickest first."""
    return (_start_up, _device, _host, _mixed, _fifty, *((lambda: _mooncake(trace),) if trace else ()))


def _start_up() -> Iterator[BenchFigure]:
    ours = _best_of(5, [sys.executable, "-m", "schedbench", "--help"])
    theirs = _best_of(5, [sys.executable, "-c", _TEN_LINES])
    yield BenchFigure("--help", ours, "s", 0.12)
    yield BenchFigure("--help over a ten-line Typer app", ours / theirs, "ratio", 1.4)


def _device() -> Iterator[BenchFigure]:
    for name, us in bench_vgpu.over_torch_us().items():
        yield BenchFigure(f"vgpu: {name}", us, "us over torch", 6.0)
    yield BenchFigure("vgpu: decode step, values none", bench_vgpu.decode_step_us(), "us", 220.0)


def _host() -> Iterator[BenchFigure]:
    for name, us, aim in bench_host.figures():
        yield BenchFigure(f"scheduler: {name}", us, "us", aim)


def _mixed() -> Iterator[BenchFigure]:
    yield from _run("mixed", load("mixed"))


def _fifty() -> Iterator[BenchFigure]:
    settings = ["arrival.concurrency=50", "requests=400", "output_tokens=256", "prompt_tokens=512"]
    scenario = load("overlap_on", [f"workload.{setting}" for setting in settings])
    yield from _run("50 running, values none", scenario, steps_aim=2000)


def _mooncake(trace: Path) -> Iterator[BenchFigure]:
    scenario = load("trace_mooncake", [f"workload.trace={trace}", "workload.requests=1500"])
    yield from _run("Mooncake head", scenario, speed_aim=10)


class _Steps(Observer):
    def __init__(self) -> None:
        self.count = 0
        self.first = self.last = 0.0

    def __enter__(self) -> _Steps:
        return self

    def __exit__(self, *error: object) -> None: ...

    def settled(self, info: StepInfo) -> None:  # noqa: ARG002
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.count += 1


def _run(
    name: str, scenario: Scenario, *, steps_aim: float | None = None, speed_aim: float | None = None
) -> Iterator[BenchFigure]:
    """Steps per second of wall time between the first and the last settled step, and virtual over wall time."""
    resolved = resolve(scenario)
    steps = _Steps()
    outcome = execute(
        resolved, resolved.relays[0], Options(device="vgpu", hazards=False), observe=lambda *_: steps
    )
    yield BenchFigure(
        f"{name}: steps", steps.count / (steps.last - steps.first), "1/s", steps_aim, lower=False
    )
    speed = outcome.result.run.emulation_speed or 0.0
    yield BenchFigure(f"{name}: virtual over wall time", speed, "ratio", speed_aim, lower=False)


def _best_of(times: int, command: list[str]) -> float:
    """Seconds of the fastest run."""
    return min(_timed(command) for _ in range(times))


def _timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start
