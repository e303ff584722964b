"""Retraction: releasing the KV of requests so that others can continue to decode."""

from __future__ import annotations

from collections.abc import Sequence

from ..admission import next_step_tokens
from ..batch import ScheduleBatch
from ..memory.allocation import evict_from_tree_cache, release_kv_cache
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
        victims.append(release(engine, batch.reqs[kept.pop()]))
        if decode_fits(engine, [batch.reqs[i] for i in kept]):
            break
    filter_rows(engine, batch, keep=sorted(kept))
    # In a pipeline a chunk of it may still be in flight.
    if chunked is not None and engine.stage is None and not decode_fits(engine, batch.reqs):
        victims.append(release(engine, chunked))
    for req in reversed(engine.tier.absent):
        if decode_fits(engine, batch.reqs):
            break
        victims.append(release(engine, req))
    return victims


def release(engine: Engine, req: Request) -> Request:
    """Release the KV of a request, which waits again."""
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


INIT_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
# Tokens that each remaining request should be able to add before the next retraction.
RETRACT_DECODE_STEPS = 20


class NewTokenRatio:
    """The share of their output limits that running requests are expected to use: falls with every decode and rises
    after a retraction (upstream ``new_token_ratio``)."""

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INIT_RATIO * conservativeness, 1.0)
        self.reset()

    def reset(self) -> None:
        self.value = self._initial

    def decay(self) -> None:
        floor = self._initial * MIN_RATIO_FACTOR
        self.value = max(self.value - (self._initial - floor) / DECAY_STEPS, floor)

    def after_retraction(self, remaining: Sequence[Request]) -> None:
        decoded = sum(len(req.output_ids) for req in remaining)
        limit = sum(req.sampling.max_new_tokens for req in remaining)
        self.value = min(1.0, (decoded + RETRACT_DECODE_STEPS * len(remaining)) / (limit + 1))


def retraction_order(reqs: Sequence[Request]) -> list[int]:
    """Indices of a batch in the order in which requests are kept. Retraction takes them from the end: the request with
    the fewest output tokens first, and among equals the one with the longest prompt first."""
    return sorted(
        range(len(reqs)),
        key=lambda i: (len(reqs[i].output_ids), -len(reqs[i].origin_input_ids)),
        reverse=True,
    )
