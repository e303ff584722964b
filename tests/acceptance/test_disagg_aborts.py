"""A client goes away while its request is anywhere between two workers: it ends once, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

from schedbench.profiles.check.invariants import Invariants
from schedbench.profiles.result import Result
from schedbench.profiles.run.chorus import Chorus
from schedbench.profiles.run.execute import Options, execute
from schedbench.profiles.run.machine import Machine
from schedbench.sched.disagg.inbox import Inbox
from schedbench.sched.loop.decoding import DecodeWorker
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.observe import Observer, Silence
from schedbench.sched.request import Request
from tests.acceptance.questions import SMALL, asked

FEW = (*SMALL, "workload.requests=12", "device.values=none")
TIGHT = ("engine.disaggregation={mode: pair, reserved_decode_tokens: 4}", "engine.kv_tokens=1600")

PHASES: dict[str, Callable[[Scheduler, Inbox], Sequence[Request]]] = {
    "queued": lambda _, inbox: inbox._queued,
    "transferring": lambda _, inbox: [receiver.req for receiver in inbox._receivers.values()],
    "ready": lambda _, inbox: [entry.req for entry in inbox._ready],
    "parked": lambda _, inbox: [entry.req for entry in inbox._parked],
    "running": lambda scheduler, _: [req for req in scheduler.running_batch.reqs if not req.finished],
}


class Leaving(Silence):
    """The last request of a phase is aborted as soon as one is in it: where the loop has received and not planned."""

    def __init__(self, scheduler: Scheduler, phase: str) -> None:
        self._worker = DecodeWorker(scheduler)
        self._scheduler = scheduler
        self._phase = PHASES[phase]
        self._left = False

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        inbox = self._scheduler.engine.inbox
        assert inbox is not None
        if name == "barrier" and not self._left and (found := self._phase(self._scheduler, inbox)):
            self._left = True
            self._worker.abort(found[-1], "the client is gone")
        return super().range(name, step, size)


class Watching(Invariants):
    """The invariants, and on the decode worker somebody who leaves."""

    phase = ""

    def of_rank(self, rank: int) -> Invariants:  # noqa: ARG002
        other = Watching(self._found)
        other.phase = self.phase
        return other

    @contextmanager
    def watching(self, scheduler: Scheduler, machine: Machine) -> Iterator[Observer]:
        with super().watching(scheduler, machine) as observer:
            leaving = scheduler.engine.inbox is not None
            yield Chorus(observer, Leaving(scheduler, self.phase)) if leaving else observer


def left(phase: str, *overrides: str) -> Result:
    question, guard = asked("mixed", *FEW, *TIGHT, *overrides), Watching()
    guard.phase = phase
    options = Options(device="vgpu", save_tokens=True, hazards=True)
    found = execute(question, question.relays[0], options, guard=guard)
    assert not guard.violations()
    assert not found.undeclared, found.result.hazards
    return found.result


@pytest.mark.parametrize("phase", PHASES)
def test_in_every_phase_it_ends_once_and_the_others_go_on(phase: str) -> None:
    question = asked("mixed", *FEW, *TIGHT)
    whole = execute(question, question.relays[0], Options(device="vgpu", save_tokens=True)).result
    tokens = {row.id: row.token_ids for row in whole.requests}
    result = left(phase)
    [gone] = [row for row in result.requests if row.status == "aborted"]
    assert gone.reason == "the client is gone"
    others = [row for row in result.requests if row is not gone]
    assert {row.status for row in others} == {"finished"}
    assert len(others) == 11
    assert all(row.token_ids == tokens[row.id] for row in others)
