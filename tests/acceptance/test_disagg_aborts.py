"""A client goes away while its request is anywhere between two workers: it ends once, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest

from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Result
from schedbench.sched.disagg.inbox import Inbox
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.request import Request
from tests.acceptance.client_aborts import Leaving, left, only_one_is_gone
from tests.acceptance.runs import SMALL, resolved

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
def test_in_every_phase_it_ends_once_and_the_others_go_on(phase: str) -> None:
    """Where the loop of the decode worker has received and not planned."""

    def leaves(scheduler: Scheduler) -> Leaving | None:
        inbox = scheduler.engine.inbox
        if inbox is None:
            return None
        return Leaving("barrier", lambda: PHASES[phase](scheduler, inbox), scheduler.abort)

    only_one_is_gone(left(resolved("mixed", *FEW, *TIGHT), leaves), whole())


@cache
def whole() -> Result:
    question = resolved("mixed", *FEW, *TIGHT)
    return execute(question, question.relays[0], Options(device="vgpu", save_tokens=True)).result
