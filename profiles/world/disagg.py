"""Prefill and decode workers and the router between them and their clients, as ranks of one virtual world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ...scenarios.workload import build
from ...sched.disagg.fake import FakeLink
from ...sched.disagg.place import Place
from ...sched.disagg.requests import run_router
from ...sched.link import Link
from ...sched.observe import Clock
from ...sched.request import Request
from ..result import RequestRow, Result
from ..run import capacity
from ..run.draft import speculation_depth
from ..run.feed import Feed
from ..run.heap import settled_heap
from ..run.machine import Machine
from ..run.machines import Port, one_thread, open_desk, open_port, open_rank
from ..run.resolve import Resolved
from ..run.runner import WARMUP_SEED, Valve
from ..run.seat import Seat, align
from ..vgpu.gpu import patched
from .baton import Member, run_ranks
from .carriers import ByMessage, Carrier, nixl
from .pairs import Heard, whole
from .ranks import PATIENCE, link_of
from .virtual import Inbox, VirtualLink

Body = Callable[[Machine, Valve, Seat], Heard]


def disaggregated_world(resolved: Resolved, hazards: bool, adversary: int | None, body: Body) -> Result:
    """``body`` is one worker's run. Raises MachineError."""
    capacity.check(resolved)
    places = places_of(resolved)
    far = resolved.scenario.engine.disaggregation.transfer == "distributed"
    profile = link_of(resolved, "rdma" if far else "nvlink")
    inboxes = [Inbox() for _ in places]

    def rank(member: Member) -> Heard | Sequence[RequestRow]:
        valve, place = Valve(), places[member.rank]
        watched = hazards and place.role != "router"
        with open_rank(resolved, valve, member, hazards=watched, adversary=adversary) as (machine, gpu):
            seat = seat_of(resolved, VirtualLink(member, gpu, inboxes, profile, patience=PATIENCE))
            if place.role == "router":
                return route(resolved, machine.clock, seat)
            return body(machine, valve, seat)

    with one_thread(), patched(hazards=hazards), settled_heap():
        return put_together(resolved, run_ranks(len(places), rank))


def places_of(resolved: Resolved) -> Sequence[Place]:
    pair = resolved.scenario.engine.disaggregation
    return [Place(rank, pair.prefill, pair.decode) for rank in range(pair.prefill + pair.decode + 1)]


def seat_of(resolved: Resolved, link: Link) -> Seat:
    place = places_of(resolved)[link.rank]
    fake = resolved.scenario.engine.disaggregation.transfer == "fake"
    return Seat(FakeLink(link, place) if fake else link, place=place)


def put_together(resolved: Resolved, told: Sequence[Heard | Sequence[RequestRow]]) -> Result:
    """What the workers heard, and the requests that the router, which is the last rank, was left with."""
    scenario = resolved.scenario
    return whole(
        places_of(resolved),
        [heard for heard in told if isinstance(heard, Heard)],
        [row for rows in told if not isinstance(rows, Heard) for row in rows],
        sent=scenario.engine.disaggregation.transfer != "fake",
        drafts=speculation_depth(scenario),
    )


@dataclass(frozen=True, slots=True)
class Workers:
    """A troupe of processes: the workers, and the router. ``passes`` are the times that a worker runs the workload."""

    resolved: Resolved
    hazards: bool
    adversary: int | None
    body: Body
    passes: int

    @property
    def names(self) -> Sequence[str]:
        return [place.name for place in places_of(self.resolved)]

    def carrier(self, rank: int, *, patience: float) -> Carrier:
        transfer = self.resolved.scenario.engine.disaggregation.transfer
        return nixl(self.names, rank, patience=patience) if transfer == "nixl" else ByMessage()

    def opened(self, rank: int, valve: Valve) -> AbstractContextManager[Port]:
        if places_of(self.resolved)[rank].role == "router":
            return open_desk(self.resolved, valve)
        return open_port(self.resolved, valve, hazards=self.hazards, adversary=self.adversary)

    def act(self, port: Port, valve: Valve, link: Link) -> Heard | Sequence[RequestRow]:
        seat = seat_of(self.resolved, link)
        if port.machine is None:
            return route(self.resolved, port.clock, seat, passes=self.passes)
        return self.body(port.machine, valve, seat)

    def whole(self, told: Sequence[Heard | Sequence[RequestRow]]) -> Result:
        return put_together(self.resolved, told)


def route(resolved: Resolved, clock: Clock, seat: Seat, *, passes: int = 1) -> Sequence[RequestRow]:
    """What ``Bench`` does on a worker: the warm-up's requests, then the workload's. Returns those that have not ended
    when the run is interrupted."""
    assert seat.place is not None and seat.link is not None
    scenario, model, feed = resolved.scenario, resolved.model, Feed()
    count, seed = scenario.measure.warmup_requests, scenario.measure.seed
    rounds = [(scenario, seed)] * passes
    if count and scenario.workload.trace is None:
        fewer = scenario.workload.model_copy(update={"requests": count})
        rounds.insert(0, (scenario.model_copy(update={"workload": fewer}), seed ^ WARMUP_SEED))
    for asked, drawn in rounds:
        workload = build(asked, vocab_size=model.vocab_size, context_len=model.max_positions, seed=drawn)
        start = align(seat, clock)
        feed.load(workload, start=start)
        try:
            run_router(feed, seat.link, clock, seat.place)
        except KeyboardInterrupt:
            return [_cancelled(request, start, clock.now()) for request in feed.alive]
    return ()


def _cancelled(request: Request, start: int, now: int) -> RequestRow:
    return RequestRow(
        id=request.id,
        arrival=request.arrival - start,
        first_token=None,
        finish=now - start,
        prompt_tokens=len(request.origin_input_ids),
        output_tokens=0,
        status="cancelled",
        reason="interrupted",
    )
