"""The parts of a worker that computes prompts for others, or decodes what others have computed the prompts of."""

from __future__ import annotations

from typing import TypedDict

from ...scenarios.combinations import overlaps
from ...sched.disagg.fake import NoPort
from ...sched.disagg.inbox import Arrivals, Inbox
from ...sched.disagg.kv import KVPort, Port
from ...sched.disagg.outbox import Outbox
from ...sched.disagg.parts import Parts
from ...sched.hisparse.arrivals import HostPort
from ...sched.memory.cache import PrefixCache
from ...sched.observe import Observer
from ...sched.relay.desk import Streams
from ...sched.speculate.worker import Worker
from .compose_sparse import Host
from .resolve import Resolved
from .seat import Seat


class Transfer(TypedDict, total=False):
    """Fields of ``Engine``."""

    outbox: Outbox
    inbox: Inbox


def transfer(
    resolved: Resolved,
    seat: Seat,
    port: KVPort | HostPort,
    arrivals: Arrivals,
    worker: Worker | None,
    *,
    cache: PrefixCache,
    streams: Streams,
    observer: Observer,
) -> Transfer:
    """Nothing where prompts are computed and decoded by one worker."""
    if seat.place is None or seat.link is None or seat.place.role == "replica":
        return {}
    scenario = resolved.scenario
    if isinstance(port, KVPort) and worker is not None and worker.kv is not None:
        port = port.with_pool(worker.kv)
    way: Port = NoPort() if scenario.engine.disaggregation.transfer == "fake" else port
    parts = Parts(seat.place, seat.link, way, cache, streams)
    if seat.place.role == "prefill":
        return {"outbox": Outbox(parts, observer, overlapped=overlaps(scenario))}
    reserve = scenario.engine.disaggregation.reserved_decode_tokens
    return {"inbox": Inbox(parts, observer, arrivals=arrivals, reserve=reserve)}


def hosted(port: KVPort, host: Host | None) -> KVPort | HostPort:
    """Where KV comes in: into the host's memory, if that is where it lives."""
    return port if host is None else HostPort(port, host.buffers, host.transfer, host.tag)
