"""Workers behind a router, replicas or prefill and decode workers, as ranks of one virtual world."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...scenarios.schema import Engine
from ...scenarios.workload import build
from ...sched.disagg.fake import FakeLink
from ...sched.disagg.place import Place
from ...sched.disagg.requests import run_router
from ...sched.link import Link
from ...sched.request import Request
from ..result import RequestRow, Result
from ..run import capacity
from ..run.draft import speculation_depth
from ..run.feed import Feed
from ..run.heap import settled_heap
from ..run.machine import Machine
from ..run.machines import one_thread, open_rank
from ..run.resolve import Resolved
from ..run.runner import WARMUP_SEED, Valve
from ..run.seat import Seat, align
from ..vgpu.gpu import patched
from .baton import Member, run_ranks
from .pairs import Heard, whole
from .ranks import PATIENCE
from .virtual import Inbox, VirtualLink

Body = Callable[[Machine, Valve, Seat], Heard]


def routed_world(resolved: Resolved, hazards: bool, adversary: int | None, body: Body) -> Result:
    """``body`` is one worker's run. Raises MachineError."""
    capacity.check(resolved)
    pair = resolved.scenario.engine.disaggregation
    places = places_of(resolved.scenario.engine)
    inboxes = [Inbox() for _ in places]
    left: list[RequestRow] = []

    def rank(member: Member) -> Heard | None:
        valve, place = Valve(), places[member.rank]
        watched = hazards and place.role != "router"
        with open_rank(resolved, valve, member, hazards=watched, adversary=adversary) as (machine, gpu):
            profile = resolved.hardware.links["nvlink"]
            link: Link = VirtualLink(member, gpu, inboxes, profile, patience=PATIENCE)
            seat = Seat(FakeLink(link, place) if pair.transfer == "fake" else link, place=place)
            if place.role == "router":
                left.extend(_route(resolved, machine, seat))
                return None
            return body(machine, valve, seat)

    with one_thread(), patched(hazards=hazards), settled_heap():
        workers = [heard for heard in run_ranks(len(places), rank) if heard is not None]
    drafts = speculation_depth(resolved.scenario)
    sent = None if pair.mode == "none" else pair.transfer != "fake"
    return whole(places, workers, left, sent=sent, drafts=drafts)


def places_of(engine: Engine) -> Sequence[Place]:
    """Every rank's, the router's last."""
    pair = engine.disaggregation
    if pair.mode == "none":
        return [Place(rank, replicas=engine.ranks) for rank in range(engine.ranks + 1)]
    return [Place(rank, pair.prefill, pair.decode) for rank in range(engine.ranks + 1)]


def _route(resolved: Resolved, machine: Machine, seat: Seat) -> Sequence[RequestRow]:
    """What ``Bench`` does on a worker: the warm-up's requests, then the workload's. Returns those that have not ended
    when the run is interrupted."""
    assert seat.place is not None and seat.link is not None
    scenario, model, feed = resolved.scenario, resolved.model, Feed()
    count, seed = scenario.measure.warmup_requests, scenario.measure.seed
    rounds = [(scenario, seed)]
    if count and scenario.workload.trace is None:
        fewer = scenario.workload.model_copy(update={"requests": count})
        rounds.insert(0, (scenario.model_copy(update={"workload": fewer}), seed ^ WARMUP_SEED))
    for asked, drawn in rounds:
        workload = build(asked, vocab_size=model.vocab_size, context_len=model.max_positions, seed=drawn)
        start = align(seat, machine.clock)
        feed.load(workload, start=start)
        try:
            run_router(feed, seat.link, machine.clock, seat.place)
        except KeyboardInterrupt:
            return [_cancelled(request, start, machine.clock.now()) for request in feed.alive]
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
