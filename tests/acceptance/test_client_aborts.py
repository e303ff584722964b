"""A client disconnects while its request is in any phase between two workers, or of a pipeline: the request ends once,
on every stage, and no memory of it stays allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

from schedbench.profiles.check.batch_invariants import Violations
from schedbench.profiles.check.invariants import Invariants
from schedbench.profiles.platform.machine import Machine
from schedbench.profiles.run.system import ObserverGroup
from schedbench.sched.disagg.inbox import Inbox
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.observe import Observer
from schedbench.sched.request import Request
from tests.acceptance.runs import SMALL, guarded, known_result, resolved, statuses
from tests.robustness import fault_runs

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


AbortOnRank = Callable[[Scheduler], Observer | None]
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


def assert_one_aborted(abort_on_rank: AbortOnRank, *overrides: str) -> None:
    """Runs with an abort, with the invariants checked. All other requests have the tokens that they have without it."""
    result = guarded(resolved("mixed", *overrides), InvariantsWithAbort(abort_on_rank))
    assert result.run.failure is None
    meant = {row.id: row.token_ids for row in known_result("mixed", *overrides).requests}
    [gone] = [row for row in result.requests if row.status != "finished"]
    assert (gone.status, gone.reason) == ("aborted", DISCONNECTED)
    others = [row for row in result.requests if row is not gone]
    assert len(others) == len(meant) - 1
    assert all(row.token_ids == meant[row.id] for row in others)


PAIR = (
    *SMALL,
    "workload.requests=12",
    "device.values=none",
    "engine.disaggregation={mode: pair, reserved_decode_tokens: 4}",
    "engine.kv_tokens=1600",
)
BETWEEN_WORKERS: dict[str, Callable[[Scheduler, Inbox], Sequence[Request]]] = {
    "queued": lambda _, inbox: inbox._queued,
    "transferring": lambda _, inbox: [receiver.req for receiver in inbox._receivers.values()],
    "ready": lambda _, inbox: [entry.req for entry in inbox._ready],
    "offloaded": lambda _, inbox: list(inbox._offloaded),
    "running": lambda scheduler, _: scheduler.running_batch.reqs,
}


@pytest.mark.parametrize("phase", BETWEEN_WORKERS)
def test_an_abort_in_any_phase_between_workers_ends_one_request_once(phase: str) -> None:
    """The abort happens where the decode worker's loop has received messages and not yet planned."""

    def abort_on_rank(scheduler: Scheduler) -> AbortOnce | None:
        inbox = scheduler.engine.inbox
        if inbox is None:
            return None
        return AbortOnce("barrier", lambda: BETWEEN_WORKERS[phase](scheduler, inbox), scheduler.abort)

    assert_one_aborted(abort_on_rank, *PAIR)


def test_a_scripted_abort_after_the_first_token_does_not_reach_the_prefill_worker() -> None:
    """The request's KV is being sent then, and it ends where it decodes."""
    marks: list[str] = []

    class Ends(Observer):
        def ended(self, request: Request) -> None:
            marks.append(request.to_finish)

    def of_prefill_worker(scheduler: Scheduler) -> Observer | None:
        return None if scheduler.engine.outbox is None else Ends()

    question = resolved("mixed", *PAIR, "workload.abort={fraction: 1, after_tokens: 1}")
    assert statuses(guarded(question, InvariantsWithAbort(of_prefill_worker))) == {"aborted"}
    assert marks == [""] * 12


FOUR = (
    *fault_runs.FEW,
    "engine.pipeline.stages=4",
    "workload.prompt_tokens.max=200",
    "engine.max_running_requests=4",
)
OF_A_PIPELINE: dict[str, Callable[[Scheduler], Sequence[Request]]] = {
    "waiting": lambda scheduler: scheduler.waiting_queue,
    "under way": lambda scheduler: [] if scheduler.chunked_req is None else [scheduler.chunked_req],
    "prefilled": lambda scheduler: _prefilled(scheduler),
    "running": lambda scheduler: scheduler.running_batch.reqs,
    "in another microbatch": lambda scheduler: [req for batch in scheduler.parked for req in batch.reqs],
}


def _prefilled(scheduler: Scheduler) -> Sequence[Request]:
    last = scheduler.last_batch
    return last.reqs if last is not None and last.forward_mode.is_extend else ()


@pytest.mark.parametrize("phase", OF_A_PIPELINE)
def test_an_abort_in_any_phase_of_a_pipeline_ends_one_request_once(phase: str) -> None:
    """The abort happens in the same iteration on every stage."""

    def abort_on_rank(scheduler: Scheduler) -> AbortOnce:
        return AbortOnce("receive", lambda: OF_A_PIPELINE[phase](scheduler), scheduler.abort)

    assert_one_aborted(abort_on_rank, *FOUR)
