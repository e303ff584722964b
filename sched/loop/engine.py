"""The components that one scheduler drives. ``profiles/run/compose.py`` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import EngineConfig
from ..data_parallel.sync import RankShare
from ..disagg.inbox import Inbox
from ..disagg.outbox import Outbox
from ..link import Link
from ..memory.cache import PrefixCache
from ..memory.pools import KVAllocator, ReqToTokenPool
from ..memory.tier import KVTier
from ..model.decoder import Model
from ..model.sampling import Sampler
from ..observe import Clock, Observer
from ..pipeline import Stage
from ..relay.row import Relay
from ..request import RequestSource
from ..speculate.worker import Worker


@dataclass(frozen=True, slots=True)
class Engine:
    config: EngineConfig
    slots: ReqToTokenPool
    allocator: KVAllocator
    cache: PrefixCache
    tier: KVTier
    runner: Model  # runs one forward of the model, eagerly or by graph
    sampler: Sampler
    grammars: Any  # compiles SamplingParams.grammar
    relay: Relay
    source: RequestSource
    clock: Clock
    observer: Observer
    layers: int = 0  # of the model, where its forwards run in parts
    worker: Worker | None = None  # of speculation
    link: Link | None = None  # to the other ranks
    stage: Stage | None = None  # of a pipeline
    share: RankShare | None = None  # of the requests, if ranks are data-parallel
    outbox: Outbox | None = None  # of a prefill worker
    inbox: Inbox | None = None  # of a decode worker

    @property
    def streams(self) -> Any:
        return self.relay.context.streams

    @property
    def pinned(self) -> bool:
        return self.config.capabilities.pinned_memory
