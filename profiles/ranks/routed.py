"""Workers behind a router, replicas or prefill and decode workers, as ranks of one virtual world or as processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ...scenarios.schema import EngineSection
from ...scenarios.workload import build
from ...sched.disagg.fake import FakeLink
from ...sched.disagg.layout import RankLayout
from ...sched.disagg.router import run_router
from ...sched.link import Link
from ...sched.observe import Clock
from ...sched.request import Request, Status
from ..platform import capacity
from ..platform.machine import Machine
from ..platform.resolve import Resolved
from ..platform.speculation import speculation_depth
from ..record.result import RequestRow, Result
from ..run.fault_injector import DiedError, inject_process_deaths
from ..run.feed import Feed
from ..run.heap import settled_heap
from ..run.machines import Chosen, OpenedRank, one_thread, open_context, open_port, open_rank
from ..run.rank_context import RankContext, align
from ..run.runner import WARMUP_SEED, GatedSink
from ..vgpu.gpu import patched
from .carriers import Carrier, nixl
from .failing import FailingPost
from .pairs import RouterReport, WorkerReport, whole
from .rank_threads import Member, run_ranks
from .ranks import PATIENCE, link_of, unbroken, usual_carrier
from .virtual import VirtualLink

Body = Callable[[Machine, GatedSink, RankContext], WorkerReport]
Part = WorkerReport | RouterReport


def routed_world(resolved: Resolved, hazards: bool, adversary: int | None, body: Body) -> Result:
    """``body`` is one worker's run. Raises MachineError."""
    capacity.check_world(resolved)
    places = places_of(resolved.scenario.engine)
    far = resolved.scenario.engine.disaggregation.transfer == "distributed"
    post, profile = FailingPost(resolved.scenario), link_of(resolved, "rdma" if far else "nvlink")

    def rank(member: Member) -> Part:
        gate, place = GatedSink(), places[member.rank]
        watched = hazards and place.role != "router"
        with open_rank(resolved, gate, member, hazards=watched, adversary=adversary) as (machine, gpu):
            link = VirtualLink(member, gpu, post, profile, patience=PATIENCE)
            way, fault_injector = post.with_faults(link)
            rank_context = _seat(resolved, way)._replace(fault_injector=fault_injector)
            if place.role == "router":
                routing = _route(resolved, machine.clock, rank_context)
                link.leave(routing.failure)
                return routing
            heard = body(machine, gate, rank_context)
            link.leave(heard.result.run.failure or "")
            return heard

    with one_thread(), patched(hazards=hazards), settled_heap():
        return post.told(_put_together(resolved, run_ranks(len(places), rank)))


def places_of(engine: EngineSection) -> Sequence[RankLayout]:
    """Every rank's, the router's last."""
    pair = engine.disaggregation
    if pair.mode == "none":
        return [RankLayout(rank, replicas=engine.ranks) for rank in range(engine.ranks + 1)]
    return [RankLayout(rank, pair.prefill, pair.decode) for rank in range(engine.ranks + 1)]


def _seat(resolved: Resolved, link: Link) -> RankContext:
    engine = resolved.scenario.engine
    place = places_of(engine)[link.rank]
    return RankContext(
        FakeLink(link, place) if engine.disaggregation.transfer == "fake" else link, place=place
    )


def _put_together(resolved: Resolved, told: Sequence[Part]) -> Result:
    """What the workers heard, and the router, which is the last rank."""
    scenario = resolved.scenario
    pair, routing = scenario.engine.disaggregation, told[-1]
    assert isinstance(routing, RouterReport)
    return whole(
        places_of(scenario.engine),
        [heard for heard in told if isinstance(heard, WorkerReport)],
        routing,
        sent=None if pair.mode == "none" else pair.transfer != "fake",
        drafts=speculation_depth(scenario),
    )


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers and the router as processes. ``passes`` is how often a worker runs the workload."""

    kind: Chosen
    resolved: Resolved
    hazards: bool
    adversary: int | None
    body: Body
    passes: int

    @property
    def names(self) -> Sequence[str]:
        return [place.name for place in places_of(self.resolved.scenario.engine)]

    def carrier(self, port: OpenedRank, rank: int, *, patience: float) -> Carrier:
        if self.resolved.scenario.engine.disaggregation.transfer == "nixl":
            return nixl(self.names, rank, patience=patience)
        return usual_carrier(self.kind, port)

    def opened(self, rank: int, gate: GatedSink) -> AbstractContextManager[OpenedRank]:
        if places_of(self.resolved.scenario.engine)[rank].role == "router":
            return open_context(self.kind, self.resolved, gate)
        return open_port(self.kind, self.resolved, gate, rank, hazards=self.hazards, adversary=self.adversary)

    def act(self, port: OpenedRank, gate: GatedSink, link: Link) -> Part:
        """Raises LinkError when the run broke off: what there is of it is kept nowhere."""
        way, fault_injector = inject_process_deaths(self.resolved.scenario, link)
        rank_context = _seat(self.resolved, way)._replace(fault_injector=fault_injector)
        if port.machine is None:
            return _route(self.resolved, port.clock, rank_context, passes=self.passes)
        return unbroken(self.body(port.machine, gate, rank_context))

    def whole(self, told: Sequence[Part]) -> Result:
        return _put_together(self.resolved, told)


def _route(resolved: Resolved, clock: Clock, rank_context: RankContext, *, passes: int = 1) -> RouterReport:
    """What ``Bench`` does on a worker: the warm-up's requests, then the workload's."""
    assert rank_context.place is not None and rank_context.link is not None
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
        start = align(rank_context, clock)
        feed.load(workload, start=start)
        if rank_context.fault_injector is not None and asked is scenario:
            rank_context.fault_injector.arm()
        try:
            ended = [*run_router(feed, rank_context.link, clock, rank_context.place)]
        except KeyboardInterrupt:
            ended = [_over(request, Status.CANCELLED, "interrupted", clock.now()) for request in feed.alive]
            break
        except DiedError as death:
            failure = str(death)
            ended = [_over(request, Status.FAILED, failure, clock.now()) for request in feed.alive]
    return RouterReport([_row(request, start) for request in ended], failure, clock.now())


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
