"""Workers behind a router, replicas or prefill and decode workers, as ranks of one virtual world."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...scenarios.schema import Engine
from ...scenarios.workload import build
from ...sched.disagg.fake import FakeLink
from ...sched.disagg.place import Place
from ...sched.disagg.requests import run_router
from ...sched.request import Request, Status
from ..result import RequestRow, Result
from ..run import capacity
from ..run.draft import speculation_depth
from ..run.feed import Feed
from ..run.heap import settled_heap
from ..run.machine import Machine
from ..run.machines import one_thread, open_rank
from ..run.perils import DiedError
from ..run.resolve import Resolved
from ..run.runner import WARMUP_SEED, Valve
from ..run.seat import Seat, align
from ..vgpu.gpu import patched
from .baton import Member, run_ranks
from .failing import FailingPost
from .pairs import Heard, Routing, whole
from .ranks import PATIENCE
from .virtual import VirtualLink

Body = Callable[[Machine, Valve, Seat], Heard]


def routed_world(resolved: Resolved, hazards: bool, adversary: int | None, body: Body) -> Result:
    """``body`` is one worker's run. Raises MachineError."""
    capacity.check(resolved)
    pair = resolved.scenario.engine.disaggregation
    places = places_of(resolved.scenario.engine)
    post, routings = FailingPost(resolved.scenario), list[Routing]()

    def rank(member: Member) -> Heard | None:
        valve, place = Valve(), places[member.rank]
        watched = hazards and place.role != "router"
        with open_rank(resolved, valve, member, hazards=watched, adversary=adversary) as (machine, gpu):
            profile = resolved.hardware.links["nvlink"]
            link = VirtualLink(member, gpu, post, profile, patience=PATIENCE)
            way, perils = post.beset(link)
            seat = Seat(FakeLink(way, place) if pair.transfer == "fake" else way, place=place, perils=perils)
            if place.role == "router":
                routings.append(_route(resolved, machine, seat))
                link.leave(routings[0].failure)
                return None
            heard = body(machine, valve, seat)
            link.leave(heard.result.run.failure or "")
            return heard

    with one_thread(), patched(hazards=hazards), settled_heap():
        workers = [heard for heard in run_ranks(len(places), rank) if heard is not None]
    drafts = speculation_depth(resolved.scenario)
    sent = None if pair.mode == "none" else pair.transfer != "fake"
    return post.told(whole(places, workers, routings[0], sent=sent, drafts=drafts))


def places_of(engine: Engine) -> Sequence[Place]:
    """Every rank's, the router's last."""
    pair = engine.disaggregation
    if pair.mode == "none":
        return [Place(rank, replicas=engine.ranks) for rank in range(engine.ranks + 1)]
    return [Place(rank, pair.prefill, pair.decode) for rank in range(engine.ranks + 1)]


def _route(resolved: Resolved, machine: Machine, seat: Seat) -> Routing:
    """What ``Bench`` does on a worker: the warm-up's requests, then the workload's."""
    assert seat.place is not None and seat.link is not None
    scenario, model, feed = resolved.scenario, resolved.model, Feed()
    count, seed = scenario.measure.warmup_requests, scenario.measure.seed
    rounds = [(scenario, seed)]
    if count and scenario.workload.trace is None:
        fewer = scenario.workload.model_copy(update={"requests": count})
        rounds.insert(0, (scenario.model_copy(update={"workload": fewer}), seed ^ WARMUP_SEED))
    ended: list[Request] = []
    failure, clock = "", machine.clock
    for asked, drawn in rounds:
        workload = build(asked, vocab_size=model.vocab_size, context_len=model.max_positions, seed=drawn)
        start = align(seat, clock)
        feed.load(workload, start=start)
        if seat.perils is not None and asked is scenario:
            seat.perils.arm()
        try:
            ended = [*run_router(feed, seat.link, clock, seat.place)]
        except KeyboardInterrupt:
            ended = [_over(request, Status.CANCELLED, "interrupted", clock.now()) for request in feed.alive]
            break
        except DiedError as death:
            failure = str(death)
            ended = [_over(request, Status.FAILED, failure, clock.now()) for request in feed.alive]
    return Routing([_row(request, start) for request in ended], failure, clock.now())


def _over(request: Request, status: Status, reason: str, now: int) -> Request:
    request.status, request.reason, request.finished_at = status, reason, now
    return request


def _row(request: Request, start: int) -> RequestRow:
    """Of a request of which the router knows no token."""
    assert request.finished_at is not None
    return RequestRow.model_validate(
        {
            "id": request.id,
            "arrival": request.arrival - start,
            "first_token": None,
            "finish": request.finished_at - start,
            "prompt_tokens": len(request.origin_input_ids),
            "output_tokens": 0,
            "status": request.status.value,
            "reason": request.reason,
        }
    )
