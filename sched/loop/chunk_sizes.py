"""Measures how long prompts take on a pipeline's first stage, before there are requests, and sets every stage's chunk
sizes by it.

The measured batches go through the relay like all others, because the relay resolves their input (sglang#26883).
"""

from __future__ import annotations

from array import array

from ..config import SamplingParams
from ..memory.allocation import release_kv_cache
from ..pipeline import ChunkSizes, Curve, fit
from ..request import Request
from .engine import Engine
from .launch import launch_stage
from .prepare import prepare_for_extend
from .scheduler import Scheduler

CHUNKS = "chunks"
_LENGTHS = 8  # how many prompts are measured, evenly spaced up to the first chunk's length


def size_chunks(scheduler: Scheduler) -> None:
    """Set the chunk sizes that follow the stage's latencies, if the engine asks for them. The first stage measures and
    sends its result to the others, so that all plan alike. Raises LinkError."""
    engine = scheduler.engine
    stage, link, config = engine.stage, engine.link, engine.config
    if stage is None or stage.smooth_chunks is None or link is None:
        return
    first = config.chunked_prefill_size
    assert first is not None, "dynamic chunk sizes need a chunk size"
    curve = _measure(engine, first) if stage.is_first else link.receive(stage.preceding, CHUNKS).value
    if not stage.is_last:
        link.send(stage.following, CHUNKS, curve)
    scheduler.chunk_sizes = ChunkSizes(curve, first, stage.smooth_chunks, config.page_size)


def _measure(engine: Engine, longest: int) -> Curve:
    lengths = sorted({max(1, longest * part // _LENGTHS) for part in range(1, _LENGTHS + 1)})
    with engine.streams.on(engine.streams.schedule):
        _time(engine, lengths[0])  # the first forward is slower than others
        return fit(lengths, [_time(engine, length) for length in lengths])


def _time(engine: Engine, length: int) -> int:
    """The duration of one prompt's forward, ns, while host and device are otherwise idle."""
    streams, prompt = engine.streams, array("q", bytes(8 * length))
    req = Request("", prompt, SamplingParams(max_new_tokens=1), arrival=0)
    match = engine.cache.match_prefix(req.tokens(0, 0))
    req.prefix_indices, req.last_node = match.device_indices, match.last_node
    req.fill_len = req.extend_input_len = length
    batch = prepare_for_extend(engine, [req], step=0)
    streams.module.synchronize()
    begin = engine.clock.now()
    with streams.on(streams.forward):
        streams.wait(streams.forward, streams.schedule)
        launch_stage(engine, batch, ())
    streams.module.synchronize()
    end = engine.clock.now()
    release_kv_cache(req, engine.cache, is_insert=False)
    return end - begin
