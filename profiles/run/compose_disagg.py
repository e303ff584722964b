"""The parts of a worker that computes prompts for others, or decodes what others have computed the prompts of."""

from __future__ import annotations

from typing import TypedDict

from ...scenarios.combinations import overlaps
from ...sched.disagg.fake import NoPort
from ...sched.disagg.inbox import Arrivals, Inbox
from ...sched.disagg.kv import KVGateway, KVPort
from ...sched.disagg.outbox import Outbox
from ...sched.disagg.parts import DisaggComponents
from ...sched.hisparse.arrivals import HostPort
from ...sched.memory.cache import PrefixCache
from ...sched.observe import Observer
from ...sched.relay.context import Streams
from ...sched.speculate.worker import Worker
from ..platform.resolve import Resolved
from .compose_sparse import Host
from .rank_context import RankContext


class DisaggTransfer(TypedDict, total=False):
    """Fields of ``Engine``."""

    outbox: Outbox
    inbox: Inbox


def transfer(
    resolved: Resolved,
    rank_context: RankContext,
    port: KVPort | HostPort,
    arrivals: Arrivals,
    worker: Worker | None,
    *,
    cache: PrefixCache,
    streams: Streams,
    observer: Observer,
) -> DisaggTransfer:
    """Nothing where prompts are computed and decoded by one worker."""
    if rank_context.place is None or rank_context.link is None or rank_context.place.role == "replica":
        return {}
    scenario = resolved.scenario
    if isinstance(port, KVPort) and worker is not None and worker.kv is not None:
        port = port.with_pool(worker.kv)
    way: KVGateway = NoPort() if scenario.engine.disaggregation.transfer == "fake" else port
    parts = DisaggComponents(rank_context.place, rank_context.link, way, cache, streams)
    if rank_context.place.role == "prefill":
        return {"outbox": Outbox(parts, observer, overlapped=overlaps(scenario))}
    reserve = scenario.engine.disaggregation.reserved_decode_tokens
    return {"inbox": Inbox(parts, observer, arrivals=arrivals, reserve=reserve)}


def hosted(port: KVPort, host: Host | None) -> KVPort | HostPort:
    """Where KV comes in: into the host's memory, if that is where it lives."""
    return port if host is None else HostPort(port, host.buffers, host.transfer, host.tag)
