"""The cost of the tool itself: figures with their units and aims, and their ratios to those of another commit.

Whole runs are processes of the command line, so that any commit can be measured. Their figures are processor time, user
and system, which depends little on other load of the machine. A step costs the difference between a long and a short
run, divided by the number of steps. All processes compute with one thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from ..judge.worker import SOURCES

# Rounds from which ``worse`` is decided. Where versions are equal and the noise is normal, one of 13 figures is called
# worse in 4 % of comparisons; with three rounds it would be in 44 %.
ROUNDS: Final = 5
_FEW: Final = 8  # output tokens of a short run
_STEPS: Final = {8: 1500, 50: 1000, 256: 800}  # of a long run beyond those, by the number of running requests
_TAIL: Final = 2000  # characters of the output of a failed process that are shown


class ProcessError(RuntimeError):
    """A process of the bench failed."""


class Usage(NamedTuple):
    seconds: float  # of processor time
    mib: float  # the most memory at a time


class Processes:
    """Runs each command once, with the sources of ``tree`` or with this package."""

    def __init__(self, tree: Path | None = None) -> None:
        path = {} if tree is None else {"PYTHONPATH": str(tree / SOURCES)}
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **path}
        # A start without compiled modules would count their compilation.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._known: dict[tuple[str, ...], Usage] = {}

    def usage(self, *arguments: str) -> Usage:
        """``arguments`` are those of Python. Raises ProcessError."""
        if arguments not in self._known:
            self._known[arguments] = self._run(arguments)
        return self._known[arguments]

    def schedbench(self, *arguments: str) -> Usage:
        return self.usage("-m", "schedbench", *arguments)

    def beyond_torch(self, *arguments: str) -> float:
        """Seconds of ``schedbench run`` without those of importing torch."""
        return self.schedbench("run", *arguments).seconds - self.usage("-c", "import torch").seconds

    def _run(self, arguments: Sequence[str]) -> Usage:
        with tempfile.TemporaryFile() as output:
            command = [sys.executable, "-P", *arguments]
            process = subprocess.Popen(command, env=self._environment, stdout=output, stderr=output)
            try:
                _, status, used = os.wait4(process.pid, 0)
            except BaseException:
                process.terminate()
                process.wait()
                raise
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode not in (0, 1):  # 1: measured, and the scenario's budget is broken
                output.seek(0)
                text = output.read().decode(errors="replace")[-_TAIL:]
                raise ProcessError(f"{' '.join(arguments)}: exit code {process.returncode}: {text}")
        return Usage(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


class BenchFigure(NamedTuple):
    """A cost: lower is better. ``values`` are of this version, ``others`` of the other commit, round by round."""

    name: str
    unit: str
    aim: float | None
    values: Sequence[float]
    others: Sequence[float] = ()

    @property
    def value(self) -> float:
        return median(self.values)

    @property
    def met(self) -> bool | None:
        return None if self.aim is None else self.value <= self.aim

    @property
    def ratios(self) -> list[float]:
        """To the other commit, in ascending order."""
        return sorted(mine / other for mine, other in zip(self.values, self.others, strict=False))

    @property
    def worse(self) -> bool | None:
        """Whether every ratio is above one, and their median by more than the distance of the lowest and highest. None
        where too few rounds decide it."""
        ratios = self.ratios
        return None if len(ratios) < ROUNDS else ratios[0] > 1 and median(ratios) - 1 > ratios[-1] - ratios[0]

    def document(self) -> dict[str, object]:
        return {**self._asdict(), "value": self.value, "ratios": self.ratios, "worse": self.worse}


def conclusion(rows: Sequence[BenchFigure]) -> str:
    """Return which aims are missed, and which figures are worse than those of the other commit, if that is decided."""
    aims = [row for row in rows if row.met is not None]
    missed = [row.name for row in aims if not row.met]
    which = f"; missed: {'; '.join(missed)}" if missed else ""
    said = f"{len(aims) - len(missed)} of {len(aims)} aims are met{which}."
    rounds = max((len(row.ratios) for row in rows), default=0)
    if rounds >= ROUNDS:
        worse = [row.name for row in rows if row.worse]
        said += f" Worse by more than their noise: {'; '.join(worse) or 'none'}."
    elif rounds:
        said += f" Fewer than {ROUNDS} rounds do not tell which are worse by more than their noise."
    return said


def measured(trace: Path | None, rounds: int, tree: Path | None, only: str = "") -> Iterator[BenchFigure]:
    """Measure the figures whose names contain ``only``, of ``tree`` too where there is one: the two sides alternate.
    A figure that ``tree`` cannot run has no ratio. ``trace`` is a Mooncake trace. Raises ProcessError."""
    sides = [(Processes(), Processes(tree)) for _ in range(rounds)]
    for name, unit, aim, cost in _whole_runs(trace):
        if only in name:
            values, others = list[float](), list[float]()
            for number, (mine, other) in enumerate(sides):
                turns = [(values, mine), *([] if tree is None else [(others, other)])]
                for kept, side in reversed(turns) if number % 2 else turns:
                    with nullcontext() if side is mine else suppress(ProcessError):
                        kept.append(cost(side))
            yield BenchFigure(name, unit, aim, values, others)
    if tree is None:
        yield from _parts(only)


_Cost = Callable[[Processes], float]


def _whole_runs(trace: Path | None) -> Iterator[tuple[str, str, float | None, _Cost]]:
    yield "--help", "s", 0.12, lambda side: side.schedbench("--help").seconds
    yield "run start, beyond importing torch", "s", 0.6, lambda side: side.beyond_torch("start")
    for running in _STEPS:
        for state in ("latest", "pr25945"):
            name = f"step, {running} running, {state}"
            aim = 500.0 if running == 50 else None
            yield name, "us", aim, partial(_step_us, running=running, state=state)
    plain, watched = (partial(_step_us, running=50, state="latest", hazards=on) for on in ("off", "on"))
    yield "step, 50 running, hazards on over off", "ratio", 1.5, lambda side: watched(side) / plain(side)
    short, stages = _closed(64, 16, requests=10_000), (*_closed(32, 32), *_PIPELINE)
    yield "10,000 short requests", "s", None, lambda side: side.beyond_torch(*short)
    yield "10,000 short requests, memory", "MiB", None, lambda side: side.schedbench("run", *short).mib
    yield "eight stages", "s", None, lambda side: side.beyond_torch(*stages)
    if trace is not None:
        head = ("trace_mooncake", *_set(f"workload.trace={trace}", "workload.requests=1500"))
        yield "head of a Mooncake trace", "s", None, lambda side: side.beyond_torch(*head)


def _step_us(side: Processes, *, running: int, state: str, hazards: str = "off") -> float:
    steps = _STEPS[running]
    options = ("--relay", state, "--hazards", hazards)
    long, short = (
        side.schedbench("run", *_closed(running, tokens), *options) for tokens in (_FEW + steps, _FEW)
    )
    return 1e6 * (long.seconds - short.seconds) / steps


def _closed(running: int, tokens: int, *, requests: int | None = None) -> tuple[str, ...]:
    """A scenario of requests with that many output tokens, ``running`` at a time."""
    return (
        "overlap_on",
        *_set(
            f"engine.max_running_requests={running}",
            f"engine.kv_tokens={running * (128 + tokens) + 8192}",
            f"workload.requests={requests or running}",
            f"workload.arrival.concurrency={running}",
            "workload.prompt_tokens={dist: fixed, value: 64}",
            f"workload.output_tokens={{dist: fixed, value: {tokens}}}",
            "measure.warmup_requests=0",
        ),
    )


def _set(*settings: str) -> tuple[str, ...]:
    return tuple(word for setting in settings for word in ("--set", setting))


_PIPELINE: Final = _set("engine.overlap=false", "engine.pipeline={stages: 8}")


def _parts(only: str) -> Iterator[BenchFigure]:
    """Parts of a step, which this version measures in its own process."""
    from .parts import scheduler_figures, vgpu_figures

    for kind, figures in (("vgpu", vgpu_figures), ("scheduler", scheduler_figures)):
        if only in kind or kind in only:
            found = (BenchFigure(f"{kind}: {name}", "us", aim, [us]) for name, us, aim in figures())
            yield from (row for row in found if only in row.name)
