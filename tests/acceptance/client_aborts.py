"""A client that goes away while its request is in a certain place, on ranks that are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from schedbench.profiles.check.invariants import Invariants
from schedbench.profiles.check.violations import Violations
from schedbench.profiles.platform.machine import Machine
from schedbench.profiles.platform.resolve import Resolved
from schedbench.profiles.record.result import Result
from schedbench.profiles.run.observers import ObserverGroup
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.observe import Observer
from schedbench.sched.request import Request
from tests.acceptance.runs import guarded

GONE = "the client is gone"


class Leaving(Observer):
    """The last request of those that are there is aborted, once: the first time that the loop comes to the range ``at``
    and one is."""

    def __init__(
        self, at: str, there: Callable[[], Sequence[Request]], abort: Callable[[Request, str], None]
    ) -> None:
        self._at = at
        self._there = there
        self._abort = abort
        self._left = False

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        if name == self._at and not self._left:
            found = [req for req in self._there() if not req.finished]
            for req in found[-1:]:
                self._left = True
                self._abort(req, GONE)
        return super().range(name, step, size)


Leaves = Callable[[Scheduler], Leaving | None]
"""Who goes away on a rank, if anybody does there."""


class Watching(Invariants):
    """The invariants, on every rank, and who goes away there."""

    def __init__(self, leaves: Leaves, found: Violations | None = None) -> None:
        super().__init__(found)
        self._leaves = leaves

    def of_rank(self, rank: int) -> Invariants:  # noqa: ARG002
        return Watching(self._leaves, self._violations)

    @contextmanager
    def watching(self, scheduler: Scheduler, machine: Machine) -> Iterator[Observer]:
        leaving = self._leaves(scheduler)
        with super().watching(scheduler, machine) as observer:
            yield observer if leaving is None else ObserverGroup(observer, leaving)


def left(question: Resolved, leaves: Leaves) -> Result:
    """A run from which somebody goes away: it keeps the invariants."""
    return guarded(question, Watching(leaves)).result


def only_one_is_gone(result: Result, whole: Result) -> None:
    """All others have the tokens that they have in the ``whole`` run, from which nobody goes away."""
    meant = {row.id: row.token_ids for row in whole.requests}
    [gone] = [row for row in result.requests if row.status != "finished"]
    assert (gone.status, gone.reason) == ("aborted", GONE)
    others = [row for row in result.requests if row is not gone]
    assert len(others) == len(meant) - 1
    assert all(row.token_ids == meant[row.id] for row in others)
