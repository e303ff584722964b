"""Steps: their kinds, when their records are complete, and the period of the loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import NamedTuple

from ...sched.observe import NO_STEP, SLEEP, Clock, Observer, StepInfo
from ..record.timeline import Window
from .distribution import Distribution

STEADY = ".steady"  # ending of the kind of a steady decode
# Kinds of steps that are launched together with a step of another kind, and are no iterations of their own.
PARTS = frozenset(("draft", "draft_extend"))
WITHOUT_LAUNCH = PARTS | {"prebuilt"}  # kinds of steps with no launch, or none of their own
OUTSIDE = "none"  # kind of what belongs to no launched step


class TimelineError(RuntimeError):
    """Records contradict the order that ``record.timeline`` defines."""


def labels(info: StepInfo) -> tuple[str, ...]:
    """The kinds that a step counts for: its own and, for a steady decode, ``decode.steady``."""
    if info.kind == "decode" and info.steady:
        return info.kind, info.kind + STEADY
    return (info.kind,)


def without_steps(kind: str) -> str:
    """That a run had no step of the kind, and of a steady decode what it would have been."""
    steady = (
        " (a decode in which no request finishes, joins or is penalised)" if kind.endswith(STEADY) else ""
    )
    return f"no step was of kind {kind}{steady}"


def is_iteration(kind: str) -> bool:
    """Whether each step of this kind is an iteration of the loop that no other kind counts."""
    return kind not in PARTS and not kind.endswith(STEADY)


_number = attrgetter("step")


class StepPeriod(NamedTuple):
    """The time of one step, from the end of the forwards that began before its own to the end of its own, ns. That of
    the first step begins with its forward; a step whose forward ends before one that began earlier has no time."""

    kind: str
    start: int
    end: int


class StepGate:
    """Lets a step pass once ``lag`` later steps have settled, the lowest number first::

    settled:   k ...... k+1 ...... k+lag
               ^ StepInfo known    ^ records of k are complete: k passes

    A prebuilt batch settles at once, before the forward that was launched ahead of it. A step waits for those with a
    lower number that have been launched and not settled: a prompt that runs in parts outlasts many decodes.
    """

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._launched: dict[int, StepInfo] = {}
        self._settled: list[StepInfo] = []
        self.passed = -1  # highest step that was let through

    def feed(self, window: Window) -> list[StepInfo]:
        """Steps that this window completes."""
        for info in window.launched:
            self._launched[info.step] = info
        for info in window.settled:
            self._launched.pop(info.step, None)
            self._settled.append(info)
        first = min(self._launched, default=None)
        ready = sum(first is None or info.step < first for info in self._settled)
        return self._pass(max(0, min(len(self._settled) - self._lag, ready)))

    def finish(self) -> list[StepInfo]:
        """The rest: settled steps, then those that a cancelled run launched and never settled."""
        self._settled.extend(self._launched.values())
        self._launched.clear()
        return self._pass(len(self._settled))

    def _pass(self, count: int) -> list[StepInfo]:
        ordered = sorted(self._settled, key=_number)
        passing, self._settled = ordered[:count], ordered[count:]
        self.passed = max([self.passed, *map(_number, passing)])
        return passing

    def reject_late(self, steps: Iterable[int], *, what: str) -> None:
        """Raises TimelineError if a record of a step arrives after the step has passed."""
        late = [step for step in steps if 0 <= step <= self.passed]
        if late:
            raise TimelineError(
                f"{what} of step {min(late)} arrived after step {self.passed} was complete "
                f"({self._lag} later steps had settled)"
            )


class SleepAnnouncingClock:
    """A clock that announces its sleeps as a range, so that a timeline can distinguish no work from late work."""

    def __init__(self, clock: Clock, observer: Observer) -> None:
        self._clock = clock
        self._observer = observer

    def now(self) -> int:
        return self._clock.now()

    def sleep_until(self, at: int) -> None:
        with self._observer.range(SLEEP, NO_STEP, 0):
            self._clock.sleep_until(at)


class StepPeriods(Observer):
    """Times from each launch to the next, ns, without periods in which the scheduler slept; a sleep that took no time
    is none. Under overlap a period belongs to no single step: it contains the settling of one step and the preparing
    of another."""

    range_names = (SLEEP,)

    def __init__(self, clock: Clock) -> None:
        self.periods = Distribution()
        self.kinds = set[str]()  # of all steps
        self._clock = clock
        self._last: int | None = None

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        return self._sleep() if name == SLEEP else super().range(name, step, size)

    @contextmanager
    def _sleep(self) -> Iterator[None]:
        begin = self._clock.now()
        yield
        if self._clock.now() > begin:
            self._last = None

    def launched(self, info: StepInfo) -> None:
        self.kinds.add(info.kind)
        if info.kind in WITHOUT_LAUNCH:
            return
        now = self._clock.now()
        if self._last is not None:
            self.periods.add(now - self._last)
        self._last = now
