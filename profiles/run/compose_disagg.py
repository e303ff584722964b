"""The parts of a worker that computes prompts for others, or decodes what others have computed the prompts of."""

from __future__ import annotations

from typing import TypedDict

from ...scenarios.combinations import overlaps
from ...sched.disagg.components import DisaggComponents
from ...sched.disagg.fake import NullPort
from ...sched.disagg.inbox import ArrivalTier, Inbox
from ...sched.disagg.kv import KVGateway, KVPort
from ...sched.disagg.outbox import Outbox
from ...sched.hisparse.host_port import HostKVPort
from ...sched.memory.cache import PrefixCache
from ...sched.observe import Observer
from ...sched.speculate.worker import Worker
from ...sched.streams import Streams
from ..platform.resolve import Resolved
from .compose_sparse import Host
from .rank_context import RankContext


class DisaggTransfer(TypedDict, total=False):
    """Fields of ``Engine``."""

    outbox: Outbox
    inbox: Inbox


def transfer(
    resolved: Resolved,
    context: RankContext,
    port: KVPort | HostKVPort,
    tier: ArrivalTier,
    worker: Worker | None,
    *,
    cache: PrefixCache,
    streams: Streams,
    observer: Observer,
) -> DisaggTransfer:
    """Nothing where prompts are computed and decoded by one worker."""
    if context.place is None or context.link is None or context.place.role == "replica":
        return {}
    scenario = resolved.scenario
    if isinstance(port, KVPort) and worker is not None and worker.kv is not None:
        port = port.with_pool(worker.kv)
    way: KVGateway = NullPort() if scenario.engine.disaggregation.transfer == "fake" else port
    components = DisaggComponents(context.place, context.link, way, cache, streams)
    if context.place.role == "prefill":
        return {"outbox": Outbox(components, observer, overlapped=overlaps(scenario))}
    reserve = scenario.engine.disaggregation.reserved_decode_tokens
    return {"inbox": Inbox(components, observer, tier=tier, reserve=reserve)}


def hosted(port: KVPort, host: Host | None) -> KVPort | HostKVPort:
    """Where KV comes in: into the host's memory, if that is where it lives."""
    return port if host is None else HostKVPort(port, host.buffers, host.transfer, host.tag)
