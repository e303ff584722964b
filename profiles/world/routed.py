"""Workers behind a router, replicas or prefill and decode workers, as ranks of one virtual world or as processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ...scenarios.schema import Engine
from ...scenarios.workload import build
from ...sched.disagg.fake import FakeLink
from ...sched.disagg.place import Place
from ...sched.disagg.requests import run_router
from ...sched.link import Link
from ...sched.observe import Clock
from ...sched.request import Request, Status
from ..result import RequestRow, Result
from ..run import capacity
from ..run.draft import speculation_depth
from ..run.feed import Feed
from ..run.heap import settled_heap
from ..run.machine import Machine
from ..run.machines import Chosen, Port, one_thread, open_desk, open_port, open_rank
from ..run.perils import DiedError, suicidal
from ..run.resolve import Resolved
from ..run.runner import WARMUP_SEED, Valve
from ..run.seat import Seat, align
from ..vgpu.gpu import patched
from .baton import Member, run_ranks
from .carriers import Carrier, nixl
from .failing import FailingPost
from .pairs import Heard, Routing, whole
from .ranks import PATIENCE, link_of, unbroken, usual_carrier
from .virtual import VirtualLink

Body = Callable[[Machine, Valve, Seat], Heard]
Part = Heard | Routing


def routed_world(resolved: Resolved, hazards: bool, adversary: int | None, body: Body) -> Result:
    """``body`` is one worker's run. Raises MachineError."""
    capacity.check_world(resolved)
    places = places_of(resolved.scenario.engine)
    far = resolved.scenario.engine.disaggregation.transfer == "distributed"
    post, profile = FailingPost(resolved.scenario), link_of(resolved, "rdma" if far else "nvlink")

    def rank(member: Member) -> Part:
        valve, place = Valve(), places[member.rank]
        watched = hazards and place.role != "router"
        with open_rank(resolved, valve, member, hazards=watched, adversary=adversary) as (machine, gpu):
            link = VirtualLink(member, gpu, post, profile, patience=PATIENCE)
            way, perils = post.beset(link)
            seat = _seat(resolved, way)._replace(perils=perils)
            if place.role == "router":
                routing = _route(resolved, machine.clock, seat)
                link.leave(routing.failure)
                return routing
            heard = body(machine, valve, seat)
            link.leave(heard.result.run.failure or "")
            return heard

    with one_thread(), patched(hazards=hazards), settled_heap():
        return post.told(_put_together(resolved, run_ranks(len(places), rank)))


def places_of(engine: Engine) -> Sequence[Place]:
    """Every rank's, the router's last."""
    pair = engine.disaggregation
    if pair.mode == "none":
        return [Place(rank, replicas=engine.ranks) for rank in range(engine.ranks + 1)]
    return [Place(rank, pair.prefill, pair.decode) for rank in range(engine.ranks + 1)]


def _seat(resolved: Resolved, link: Link) -> Seat:
    engine = resolved.scenario.engine
    place = places_of(engine)[link.rank]
    return Seat(FakeLink(link, place) if engine.disaggregation.transfer == "fake" else link, place=place)


def _put_together(resolved: Resolved, told: Sequence[Part]) -> Result:
    """What the workers heard, and the router, which is the last rank."""
    scenario = resolved.scenario
    pair, routing = scenario.engine.disaggregation, told[-1]
    assert isinstance(routing, Routing)
    return whole(
        places_of(scenario.engine),
        [heard for heard in told if isinstance(heard, Heard)],
        routing,
        sent=None if pair.mode == "none" else pair.transfer != "fake",
        drafts=speculation_depth(scenario),
    )


@dataclass(frozen=True, slots=True)
class Workers:
    """A troupe of processes: the workers, and the router. ``passes`` are the times that a worker runs the workload."""

    kind: Chosen
    resolved: Resolved
    hazards: bool
    adversary: int | None
    body: Body
    passes: int

    @property
    def names(self) -> Sequence[str]:
        return [place.name for place in places_of(self.resolved.scenario.engine)]

    def carrier(self, port: Port, rank: int, *, patience: float) -> Carrier:
        if self.resolved.scenario.engine.disaggregation.transfer == "nixl":
            return nixl(self.names, rank, patience=patience)
        return usual_carrier(self.kind, port)

    def opened(self, rank: int, valve: Valve) -> AbstractContextManager[Port]:
        if places_of(self.resolved.scenario.engine)[rank].role == "router":
            return open_desk(self.kind, self.resolved, valve)
        return open_port(
            self.kind, self.resolved, valve, rank, hazards=self.hazards, adversary=self.adversary
        )

    def act(self, port: Port, valve: Valve, link: Link) -> Part:
        """Raises LinkError when the run broke off: what there is of it is kept nowhere."""
        way, perils = suicidal(self.resolved.scenario, link)
        seat = _seat(self.resolved, way)._replace(perils=perils)
        if port.machine is None:
            return _route(self.resolved, port.clock, seat, passes=self.passes)
        return unbroken(self.body(port.machine, valve, seat))

    def whole(self, told: Sequence[Part]) -> Result:
        return _put_together(self.resolved, told)


def _route(resolved: Resolved, clock: Clock, seat: Seat, *, passes: int = 1) -> Routing:
    """What ``Bench`` does on a worker: the warm-up's requests, then the workload's."""
    assert seat.place is not None and seat.link is not None
    scenario, model, feed = resolved.scenario, resolved.model, Feed()
    count, seed = scenario.measure.warmup_requests, scenario.measure.seed
    rounds = [(scenario, seed)] * passes
    if count and scenario.workload.trace is None:
        fewer = scenario.workload.model_copy(update={"requests": count})
        rounds.insert(0, (scenario.model_copy(update={"workload": fewer}), seed ^ WARMUP_SEED))
    ended: list[Request] = []
    failure = ""
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
