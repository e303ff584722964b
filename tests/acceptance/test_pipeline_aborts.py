"""A client goes away while its request is anywhere in a pipeline: it ends once, on every stage, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.request import Request
from tests.acceptance.client_aborts import Leaving, left, only_one_is_gone
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
def test_in_every_phase_it_ends_once_and_the_others_go_on(phase: str) -> None:
    """At the same turn on every stage."""

    def leaves(scheduler: Scheduler) -> Leaving:
        return Leaving("receive", lambda: PHASES[phase](scheduler), scheduler.abort)

    result = left(resolved("mixed", *FEW, *FOUR), leaves)
    assert result.run.failure is None
    only_one_is_gone(result, whole(*FOUR))
