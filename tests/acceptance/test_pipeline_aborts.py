"""A client disconnects while its request is in any phase of a pipeline: it ends once, on every stage, and no memory of
it stays allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.request import Request
from tests.acceptance.client_aborts import AbortOnce, assert_only_one_aborted, run_with_abort
from tests.acceptance.runs import resolved
from tests.robustness.fault_runs import FEW, whole

FOUR = ("engine.pipeline.stages=4", "workload.prompt_tokens.max=200", "engine.max_running_requests=4")

PHASES: dict[str, Callable[[Scheduler], Sequence[Request]]] = {
    "waiting": lambda scheduler: scheduler.waiting_queue,
    "under way": lambda scheduler: [] if scheduler.chunked_req is None else [scheduler.chunked_req],
    "prefilled": lambda scheduler: _prefilled(scheduler),
    "running": lambda scheduler: scheduler.running_batch.reqs,
    "in another microbatch": lambda scheduler: [req for batch in scheduler.parked for req in batch.reqs],
}


def _prefilled(scheduler: Scheduler) -> Sequence[Request]:
    last = scheduler.last_batch
    return last.reqs if last is not None and last.forward_mode.is_extend else ()


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_in_any_phase_ends_one_request_once(phase: str) -> None:
    """The abort happens in the same iteration on every stage."""

    def abort_on_rank(scheduler: Scheduler) -> AbortOnce:
        return AbortOnce("receive", lambda: PHASES[phase](scheduler), scheduler.abort)

    result = run_with_abort(resolved("mixed", *FEW, *FOUR), abort_on_rank)
    assert result.run.failure is None
    assert_only_one_aborted(result, whole(*FOUR))
