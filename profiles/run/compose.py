"""From a scenario, a device and observers to a scheduler that is ready to run. The only place where parts meet."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from ...scenarios.combinations import overlaps
from ...scenarios.schema import EngineSection, Scenario, SplitPrefill
from ...sched.config import BlockConfig, Control, Division, EngineConfig, HiSparseConfig, SplitPrefillConfig
from ...sched.disagg.inbox import Inbox
from ...sched.disagg.kv import DisaggComponents, KVGateway, KVPort
from ...sched.disagg.outbox import Outbox
from ...sched.hisparse.pools import HotBuffers
from ...sched.hisparse.transfer import HostKVPort
from ...sched.link import Link
from ...sched.loop.blocks import BlockScheduler
from ...sched.loop.engine import Engine
from ...sched.loop.scheduler import Scheduler
from ...sched.loop.workers import DataRank, DecodeWorker, PrefillWorker, Replica
from ...sched.memory.cache import ChunkCache, PrefixCache, RadixCache
from ...sched.memory.pools import KVAllocator, PagedAllocator, ReqToTokenPool
from ...sched.memory.tier import KVTier
from ...sched.model.decoder import Model
from ...sched.model.grammar import GrammarCache
from ...sched.model.runner import ModelRunner
from ...sched.model.sampling import Sampler
from ...sched.model.tags import TagPool
from ...sched.observe import Clock, Observer, StreamName
from ...sched.relay.row import DraftRow, Relay, RelayRow
from ...sched.request import RequestSource
from ...sched.speculate.worker import Worker
from ...sched.streams import Streams
from ..platform.machine import Machine
from ..platform.resolve import Resolved, speculative_config
from .compose_model import RankModel, draft_worker, host_kv, kv_tier
from .declared_hazards import name_pools
from .rank_context import ALONE, RankContext


class Guard(Protocol):
    """Checks a run from inside, without any effect on the scheduler."""

    def of_rank(self, rank: int) -> Guard:
        """The guard of one rank of several."""

    def row(self, row: RelayRow) -> RelayRow: ...

    def draft_row(self, row: DraftRow) -> DraftRow: ...

    def runner(self, runner: Model) -> Model: ...

    def worker(self, worker: Worker) -> Worker: ...

    def link(self, link: Link) -> Link: ...

    def watching(self, scheduler: Scheduler, machine: Machine) -> AbstractContextManager[Observer]:
        """The guard's observer of one workload."""


class SystemParts(NamedTuple):
    """What a system is made from. ``observer``, ``clock`` and ``source`` take no host time."""

    resolved: Resolved
    machine: Machine
    observer: Observer
    clock: Clock
    source: RequestSource
    sampler: Sampler | None = None  # instead of the system's own
    guard: Guard | None = None
    context: RankContext = ALONE


@dataclass(frozen=True, slots=True)
class Composition:
    scheduler: Scheduler
    tags: TagPool | None  # only with values none
    buffers: HotBuffers | None  # only with KV on the host


def engine_config(resolved: Resolved, machine: Machine, context: RankContext = ALONE) -> EngineConfig:
    """The scenario's engine on that machine. What both have by the same name is taken from the scenario, unless it is
    decided here."""
    scenario, model = resolved.scenario, resolved.model
    engine, blocks = scenario.engine, scenario.engine.block_diffusion
    same: dict[str, Any] = {
        field.name: getattr(engine, field.name)
        for field in fields(EngineConfig)
        if field.name in EngineSection.model_fields
    }
    return replace(
        EngineConfig(machine.device, machine.capabilities, **same),
        overlap=overlaps(scenario),
        most_requests=max(scenario.workload.requests or sys.maxsize, scenario.measure.warmup_requests),
        kv_tokens=engine.kv_tokens // engine.page_size * engine.page_size,
        context_len=model.max_positions,
        # Only decodes are replayed.
        cuda_graph=engine.cuda_graph
        and not (engine.embedding or blocks.enabled or engine.split_prefill.enabled),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        seed=scenario.measure.seed,
        hisparse=_hisparse(resolved) if context.decodes else None,
        stages=engine.pipeline.stages,
        split_prefill=_split_prefill(engine.split_prefill),
        blocks=BlockConfig(blocks.block_size, blocks.threshold, model.vocab_size - 1)
        if blocks.enabled
        else None,
        encoder=bool(model.cross_layers),
        controls=_controls(scenario),
        speculative=speculative_config(engine.speculative),
    )


def _split_prefill(wanted: SplitPrefill) -> SplitPrefillConfig | None:
    if not wanted.enabled:
        return None
    return SplitPrefillConfig(
        wanted.token_budget,
        tuple(Division(part.prefill, part.decode, part.from_rows) for part in wanted.divisions),
    )


def _controls(scenario: Scenario) -> tuple[Control, ...]:
    scripted = sorted(scenario.workload.controls, key=attrgetter("at"))
    return tuple(Control(entry.action, entry.at, round((entry.ms or 0) * 1e6)) for entry in scripted)


def _hisparse(resolved: Resolved) -> HiSparseConfig | None:
    wanted, indexer = resolved.scenario.engine.hisparse, resolved.model.indexer
    if not wanted.enabled or indexer is None:
        return None
    return HiSparseConfig(wanted.buffer_size(indexer.top_k), wanted.host_ratio)


def compose(parts: SystemParts) -> Composition:
    """Raises CheckpointError when a checkpoint of the scenario cannot be read."""
    resolved, observer, guard, context = parts.resolved, parts.observer, parts.guard, parts.context
    config = engine_config(resolved, parts.machine, context)
    streams = _streams(config, observer)
    # On the schedule stream, for which every forward waits: no stream waits for the default one.
    with streams.on(streams.schedule):
        # Rows are longer than a context by the tokens that drafts may write after its end.
        longest = config.context_len + (0 if config.speculative is None else config.speculative.overhang)
        slots = ReqToTokenPool(config.max_running_requests, longest, device=config.device)
        allocator = _allocator(config, config.logical_tokens)
        relay = _relay(parts, config, streams, slots)
        pages = relay.context.pages
        model = RankModel(resolved, config, context)
        host = host_kv(model, pages)
        decoder = model.decoder(pages, None if host is None else host.locator)
        on_device = _allocator(config, config.kv_tokens)
        tier = kv_tier(host, allocator, on_device, slots=slots, streams=streams, observer=observer)
    shares_prefixes = config.radix_cache and context.computes_prompts
    cache = (RadixCache if shares_prefixes else ChunkCache)(slots, allocator)
    sampler = parts.sampler or Sampler()
    streams.wait(streams.forward, streams.schedule)
    with streams.on(streams.forward):
        runner: Model = ModelRunner(decoder, config, context.proxies(resolved.model, model.tags))
        worker = draft_worker(model, decoder, sampler=sampler, pages=pages)
    port = model.port() if host is None else HostKVPort(model.port(), host.buffers, host.transfer)
    outbox, inbox = _transfer(parts, port, tier, worker, cache, streams)
    engine = Engine(
        config=config,
        slots=slots,
        allocator=allocator,
        cache=cache,
        tier=tier,
        runner=runner if guard is None else guard.runner(runner),
        sampler=sampler,
        grammars=GrammarCache(config.vocab_size, config.eos_token_ids),
        relay=relay,
        source=context.source(parts.source),
        clock=parts.clock,
        observer=observer,
        layers=resolved.model.num_layers,
        worker=worker if guard is None or worker is None else guard.worker(worker),
        link=context.link,
        stage=context.stage,
        share=context.share,
        outbox=outbox,
        inbox=inbox,
    )
    name_pools(parts.machine, engine)
    buffers = None if host is None else host.buffers
    return Composition(_scheduler_class(config, context)(engine), model.tags, buffers)


def _streams(config: EngineConfig, observer: Observer) -> Streams:
    streams = Streams.of(config)
    names: tuple[StreamName, ...] = ("copy", "forward", "schedule")
    for name in names:  # where all three are one stream, it keeps the last name
        observer.stream(name, getattr(streams, name))
    return streams


def _relay(parts: SystemParts, config: EngineConfig, streams: Streams, slots: ReqToTokenPool) -> Relay:
    choice, guard = parts.resolved.relay, parts.guard
    mode = None if config.speculative is None else config.speculative.mode
    row = choice.row(overlap=config.overlap, speculation=mode, staged=config.stages > 1)
    drafts = choice.draft_row(mode)
    return Relay.of(
        row if guard is None else guard.row(row),
        config,
        streams=streams,
        observer=parts.observer,
        req_to_token=slots.req_to_token,
        drafts=drafts if guard is None or drafts is None else guard.draft_row(drafts),
    )


def _allocator(config: EngineConfig, tokens: int) -> KVAllocator:
    kind = KVAllocator if config.page_size == 1 else PagedAllocator
    return kind(tokens, config.page_size, config.device)


def _transfer(
    parts: SystemParts,
    port: KVPort | HostKVPort,
    tier: KVTier,
    worker: Worker | None,
    cache: PrefixCache,
    streams: Streams,
) -> tuple[Outbox | None, Inbox | None]:
    """The outbox of a prefill worker, the inbox of a decode worker; neither where one worker computes prompts and
    decodes them."""
    context, scenario = parts.context, parts.resolved.scenario
    if context.place is None or context.link is None or context.place.role == "replica":
        return None, None
    if isinstance(port, KVPort) and worker is not None and worker.kv is not None:
        port = port.with_pool(worker.kv)
    way: KVGateway = KVPort(None) if scenario.engine.disaggregation.transfer == "fake" else port
    components = DisaggComponents(context.place, context.link, way, cache, streams)
    if context.place.role == "prefill":
        return Outbox(components, parts.observer, overlapped=overlaps(scenario)), None
    reserve = scenario.engine.disaggregation.reserved_decode_tokens
    return None, Inbox(components, parts.observer, tier=tier, reserve=reserve)


def _scheduler_class(config: EngineConfig, context: RankContext) -> type[Scheduler]:
    if config.blocks is not None:
        return BlockScheduler
    if context.share is not None:
        return DataRank
    if context.place is None:
        return Scheduler
    return {"replica": Replica, "prefill": PrefillWorker, "decode": DecodeWorker}[context.place.role]
