"""A client goes away while its request is anywhere in a pipeline: it ends once, on every stage, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

from schedbench.profiles.check.invariants import Invariants
from schedbench.profiles.run.chorus import Chorus
from schedbench.profiles.run.execute import Options, execute
from schedbench.profiles.run.machine import Machine
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.observe import Observer, Silence
from schedbench.sched.request import Request
from tests.acceptance.questions import asked
from tests.robustness.breaking import FEW, whole

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


class Leaving(Silence):
    """The last request of a phase is aborted at the first turn that finds one in it: the same on every stage."""

    def __init__(self, scheduler: Scheduler, phase: str) -> None:
        self._scheduler = scheduler
        self._phase = PHASES[phase]
        self._left = False

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        if name == "receive" and not self._left:
            found = [req for req in self._phase(self._scheduler) if not req.finished]
            for req in found[-1:]:
                self._left = True
                self._scheduler.abort(req, "the client is gone")
        return super().range(name, step, size)


class Watching(Invariants):
    """The invariants, and on every stage the one who leaves."""

    phase = ""

    def of_rank(self, rank: int) -> Invariants:  # noqa: ARG002
        other = Watching(self._found)
        other.phase = self.phase
        return other

    @contextmanager
    def watching(self, scheduler: Scheduler, machine: Machine) -> Iterator[Observer]:
        with super().watching(scheduler, machine) as observer:
            yield Chorus(observer, Leaving(scheduler, self.phase))


@pytest.mark.parametrize("phase", PHASES)
def test_in_every_phase_it_ends_once_and_the_others_go_on(phase: str) -> None:
    question, guard = asked("mixed", *FEW, *FOUR), Watching()
    guard.phase = phase
    options = Options(device="vgpu", save_tokens=True, hazards=True)
    found = execute(question, question.relays[0], options, guard=guard)
    assert not guard.violations()
    assert not found.undeclared, found.result.hazards
    assert found.result.run.failure is None
    meant = {row.id: row.token_ids for row in whole(*FOUR).requests}
    [gone] = [row for row in found.result.requests if row.status != "finished"]
    assert (gone.status, gone.reason) == ("aborted", "the client is gone")
    others = [row for row in found.result.requests if row is not gone]
    assert len(others) == len(meant) - 1
    assert all(row.token_ids == meant[row.id] for row in others)
