"""A loop that runs prompts beside decodes on one GPU, each on a share of its multiprocessors (upstream's multiplexing
of prefill and decode).

A prompt runs in parts of a few layers, one part beside each decode. It never waits for a decode, nor a decode for it::

    schedule stream   decode | decode | decode | decode | decode with the prompt's requests
    forward stream    layers 0-3 | layers 4-7 | ... | sample

Upstream prepares and joins prompts on the stream that runs them, and nothing orders that after the decodes. Here all of
it runs on the decodes' stream, the schedule stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..batch import ForwardBatch, LayerPart, ScheduleBatch, StepResult
from .engine import Engine
from .launch import launch_step, make_forward_batch, sample_forward
from .retract import decode_fits
from .scheduler import Scheduler


def run_multiplexed(scheduler: Scheduler) -> None:
    """Run until every request of the source has ended."""
    streams, lanes = scheduler.engine.streams, Lanes(scheduler.engine)
    prompt: SplitPrompt | None = None
    while True:
        with streams.on(streams.schedule):
            scheduler.receive()
            if prompt is None:
                prompt = _begin(scheduler)
            decode = _next_decode(scheduler, beside=prompt is not None)
            if decode is None and prompt is None and scheduler.waiting_queue:
                prompt = _begin(scheduler)  # which had no row before the last decodes ended
            if decode is None and prompt is None and not scheduler.rest():
                return
        lanes.divide(0 if decode is None else decode.batch_size, beside=prompt is not None)
        with streams.on(streams.schedule):
            result = None if decode is None else launch_step(scheduler.engine, decode, overlapped=False)
            record = None if decode is None else scheduler.launched(decode)
            if prompt is not None:
                prompt.advance()
            if record is not None and result is not None:
                scheduler.settle(record, result)
            if prompt is not None and prompt.ended(wait=decode is None):
                scheduler.settle(prompt.record, prompt.result)
                scheduler.last_batch, prompt = prompt.batch, None


@dataclass(slots=True)
class SplitPrompt:
    """Prompts whose forward runs in parts on the forward stream."""

    engine: Engine
    batch: ScheduleBatch
    result: StepResult
    record: ScheduleBatch
    forward: ForwardBatch | None = None  # from the first part on
    is_launched: bool = False  # completely
    done: Any = None  # event behind the last part

    def advance(self) -> None:
        """Enqueue the next part, if one is left; the last one samples."""
        engine, batch, wanted = self.engine, self.batch, self.engine.config.split_prefill
        if self.is_launched:
            return
        with engine.streams.on(engine.streams.forward):
            if self.forward is None:
                with engine.relay.isolate(batch):
                    self.forward = make_forward_batch(engine, batch)
                self.forward.part = LayerPart(0, 0, engine.layers)
            part = self.forward.part
            assert part is not None and wanted is not None
            part.advance(max(1, wanted.token_budget // self.forward.num_tokens))
            with engine.observer.range("model", batch.step, batch.num_tokens):
                output = engine.runner.forward(self.forward)
            if not part.is_last:
                return
            sampled, result = sample_forward(engine, batch, output), self.result
            with engine.observer.range("publish", batch.step, batch.batch_size):
                engine.relay.publish(batch)
                engine.relay.stash(result.future_indices, sampled.token_ids)
            result.next_token_ids, result.next_token_logprobs = sampled
            engine.relay.conclude(batch, result)
            if engine.config.capabilities.events:
                self.done = engine.streams.module.Event()
                self.done.record()
            self.is_launched = True

    def ended(self, *, wait: bool) -> bool:
        """Whether the last part has run; with ``wait``, the host waits for it if it has been enqueued."""
        if not self.is_launched or self.done is None:
            return self.is_launched
        if wait or self.done.query():
            self.done.synchronize()
            return True
        return False


class Lanes:
    """Pairs of schedule and forward streams: the first with the whole GPU, and one pair for each division."""

    def __init__(self, engine: Engine) -> None:
        streams, wanted = engine.streams, engine.config.split_prefill
        assert wanted is not None
        self._streams = streams
        self._divisions = wanted.divisions if engine.config.capabilities.side_streams else ()
        self._pairs = [(streams.schedule, streams.forward)]
        for division in self._divisions:
            make = streams.module.green_contexts.GreenContext.create
            pair = make(num_sms=division.decode).Stream(), make(num_sms=division.prefill).Stream()
            engine.observer.stream("schedule", pair[0])
            engine.observer.stream("forward", pair[1])
            self._pairs.append(pair)
        self._current = 0

    def divide(self, decoding: int, *, beside: bool) -> None:
        """Divide the GPU if prompts and decodes run side by side. The host waits for both streams before that."""
        fitting = [i for i, division in enumerate(self._divisions, 1) if decoding >= division.from_rows]
        chosen = fitting[-1] if fitting and beside and decoding else 0
        if chosen == self._current:
            return
        self._current, streams = chosen, self._streams
        streams.forward.synchronize()
        streams.schedule.synchronize()
        streams.schedule, streams.forward = self._pairs[chosen]


def _begin(scheduler: Scheduler) -> SplitPrompt | None:
    engine = scheduler.engine
    batch = scheduler.numbered(scheduler.next_prefill_batch())
    scheduler.last_batch = batch
    if batch is None:
        return None
    # Now, since no part waits for a decode that is launched later.
    engine.streams.wait(engine.streams.forward, engine.streams.schedule)
    result = StepResult(next_token_ids=None, future_indices=engine.relay.open(batch))
    engine.relay.host_lengths(batch)
    return SplitPrompt(engine, batch, result, scheduler.launched(batch))


def _next_decode(scheduler: Scheduler, *, beside: bool) -> ScheduleBatch | None:
    """The next decode; none while the prompts beside it hold the KV that it needs."""
    running = scheduler.running_batch
    if running.is_empty or (beside and not decode_fits(scheduler.engine, running.reqs)):
        return None
    return scheduler.numbered(scheduler.next_decode_batch())
