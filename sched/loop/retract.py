"""Retraction: releasing the KV of requests so that others can continue to decode. Which requests are retracted is
decided by ``admission/retraction_policy.py``."""

from __future__ import annotations

from collections.abc import Sequence

from ..admission.growth import next_step_tokens
from ..admission.retraction_policy import retraction_order
from ..batch import ScheduleBatch
from ..memory.allocation import evict_from_tree_cache
from ..memory.release import release_kv_cache
from ..request import Request, Status
from .engine import Engine
from .prepare import filter_rows


def decode_fits(engine: Engine, reqs: Sequence[Request]) -> bool:
    """Whether each request can decode one more token; evicts from the prefix cache if that is needed."""
    needed = next_step_tokens(reqs, engine.config)
    evict_from_tree_cache(engine.cache, needed)
    return engine.allocator.available_size() >= needed and engine.tier.fits(reqs)


def retract(engine: Engine, batch: ScheduleBatch, chunked: Request | None) -> list[Request]:
    """Release the KV of requests, the least advanced first, until the rest of ``batch`` can decode one more token.
    Returns the retracted requests.

    ``chunked``, whose prompt is being computed, and requests that are being staged are retracted before the last
    decoding request, which could otherwise never continue.
    """
    speculates = engine.config.speculative is not None  # then from the end of the batch, as upstream does
    kept = list(range(batch.batch_size)) if speculates else retraction_order(batch.reqs)
    victims: list[Request] = []
    # In a pipeline the last request can be retracted too: other microbatches may hold the KV that it needs.
    while len(kept) > (engine.stage is None):
        victims.append(_release(engine, batch.reqs[kept.pop()]))
        if decode_fits(engine, [batch.reqs[i] for i in kept]):
            break
    filter_rows(engine, batch, keep=sorted(kept))
    # In a pipeline a chunk of it may still be in flight.
    fixed = engine.stage is not None
    if chunked is not None and not fixed and not decode_fits(engine, batch.reqs):
        victims.append(_release(engine, chunked))
    for req in reversed(engine.tier.absent):
        if decode_fits(engine, batch.reqs):
            break
        victims.append(_release(engine, req))
    return victims


def _release(engine: Engine, req: Request) -> Request:
    engine.tier.release(req)
    if engine.inbox is not None and not req.to_finish:
        engine.inbox.offload(req)
    speculative = engine.config.speculative is not None
    release_kv_cache(req, engine.cache, is_insert=False, speculative=speculative)
    req.status = Status.WAITING
    req.retraction_count += 1
    req.inflight_middle_chunks = 0
    engine.observer.retracted(req)
    return req
