"""A client that disconnects while its request is in a given phase, on ranks with their invariants checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from schedbench.profiles.check.batch_invariants import Violations
from schedbench.profiles.check.invariants import Invariants
from schedbench.profiles.platform.machine import Machine
from schedbench.profiles.platform.resolve import Resolved
from schedbench.profiles.record.result import Result
from schedbench.profiles.run.system import ObserverGroup
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.observe import Observer
from schedbench.sched.request import Request
from tests.acceptance.runs import guarded

DISCONNECTED = "the client disconnected"


class AbortOnce(Observer):
    """Aborts the last of the requests that ``there`` returns, once: the first time that the loop enters the range
    ``at`` and there is one."""

    def __init__(
        self, at: str, there: Callable[[], Sequence[Request]], abort: Callable[[Request, str], None]
    ) -> None:
        self._at = at
        self._there = there
        self._abort = abort
        self._done = False

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        if name == self._at and not self._done:
            found = [req for req in self._there() if not req.finished]
            for req in found[-1:]:
                self._done = True
                self._abort(req, DISCONNECTED)
        return super().range(name, step, size)


AbortOnRank = Callable[[Scheduler], AbortOnce | None]
"""Returns the observer that aborts a request on a rank, or None."""


class InvariantsWithAbort(Invariants):
    """Checks the invariants on every rank, and aborts a request."""

    def __init__(self, abort_on_rank: AbortOnRank, found: Violations | None = None) -> None:
        super().__init__(found)
        self._abort_on_rank = abort_on_rank

    def of_rank(self, rank: int) -> Invariants:  # noqa: ARG002
        return InvariantsWithAbort(self._abort_on_rank, self._violations)

    @contextmanager
    def watching(self, scheduler: Scheduler, machine: Machine) -> Iterator[Observer]:
        aborting = self._abort_on_rank(scheduler)
        with super().watching(scheduler, machine) as observer:
            yield observer if aborting is None else ObserverGroup(observer, aborting)


def run_with_abort(question: Resolved, abort_on_rank: AbortOnRank) -> Result:
    """Runs the question with an abort and checks the invariants."""
    return guarded(question, InvariantsWithAbort(abort_on_rank))


def assert_only_one_aborted(result: Result, whole: Result) -> None:
    """All other requests have the tokens that they have in ``whole``, a run without an abort."""
    meant = {row.id: row.token_ids for row in whole.requests}
    [gone] = [row for row in result.requests if row.status != "finished"]
    assert (gone.status, gone.reason) == ("aborted", DISCONNECTED)
    others = [row for row in result.requests if row is not gone]
    assert len(others) == len(meant) - 1
    assert all(row.token_ids == meant[row.id] for row in others)
