"""A client disconnects while its request is in any phase between two workers: the request ends once, and no memory of
it stays allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest

from schedbench.profiles.record.result import Result
from schedbench.sched.disagg.inbox import Inbox
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.request import Request
from tests.acceptance.client_aborts import AbortOnce, assert_only_one_aborted, run_with_abort
from tests.acceptance.runs import SMALL, executed, resolved

FEW = (*SMALL, "workload.requests=12", "device.values=none")
TIGHT = ("engine.disaggregation={mode: pair, reserved_decode_tokens: 4}", "engine.kv_tokens=1600")

PHASES: dict[str, Callable[[Scheduler, Inbox], Sequence[Request]]] = {
    "queued": lambda _, inbox: inbox._queued,
    "transferring": lambda _, inbox: [receiver.req for receiver in inbox._receivers.values()],
    "ready": lambda _, inbox: [entry.req for entry in inbox._ready],
    "offloaded": lambda _, inbox: [entry.req for entry in inbox._offloaded],
    "running": lambda scheduler, _: scheduler.running_batch.reqs,
}


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_in_any_phase_ends_one_request_once(phase: str) -> None:
    """The abort happens where the decode worker's loop has received messages and not yet planned."""

    def abort_on_rank(scheduler: Scheduler) -> AbortOnce | None:
        inbox = scheduler.engine.inbox
        if inbox is None:
            return None
        return AbortOnce("barrier", lambda: PHASES[phase](scheduler, inbox), scheduler.abort)

    assert_only_one_aborted(run_with_abort(resolved("mixed", *FEW, *TIGHT), abort_on_rank), whole())


@cache
def whole() -> Result:
    return executed(resolved("mixed", *FEW, *TIGHT), save_tokens=True)
