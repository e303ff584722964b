"""One stage of a pipeline: microbatches take turns, each with a running batch of its own (upstream
``scheduler_pp_mixin``).

    stage 0   | mb 0 | mb 1 | mb 0 | ...      while stage 1 runs microbatch 0, stage 0 runs microbatch 1
    stage 1          | mb 0 | mb 1 | ...      tokens of mb 0 travel last -> 0 -> 1 -> ... before its next turn

Every stage plans the same batches from the same requests. In its turn a microbatch is launched, and then the tokens of
the one whose turn is next are waited for and settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..batch import ForwardMode, ScheduleBatch, StepResult
from ..link import Link, LinkError
from ..pipeline.source import FirstStageSource, ForwardedSource
from ..pipeline.stage import Stage
from .engine import Engine
from .launch import launch_stage
from .scheduler import Scheduler

PROXY, OUTPUT = "proxy", "output"


@dataclass(slots=True)
class InFlightMicrobatch:
    """A launched microbatch whose tokens have not come round yet."""

    batch: ScheduleBatch
    record: ScheduleBatch
    result: StepResult
    silent: bool  # nobody needs its tokens


@dataclass(slots=True)
class Microbatch:
    running: ScheduleBatch = field(default_factory=ScheduleBatch.empty)
    last: ScheduleBatch | None = None
    flight: InFlightMicrobatch | None = None

    @property
    def batches(self) -> Sequence[ScheduleBatch]:
        return [self.running] if self.last is None else [self.running, self.last]

    @property
    def idle(self) -> bool:
        return self.flight is None and self.last is None and self.running.is_empty


def run_pipelined(scheduler: Scheduler) -> None:
    """Run until every request of the source has ended, on every stage. Raises LinkError when another stage is gone,
    once nothing is left here."""
    streams = scheduler.engine.streams
    slots = [Microbatch() for _ in range(_stage(scheduler.engine).microbatches)]
    with streams.on(streams.schedule):
        try:
            _take_turns(scheduler, slots)
        except LinkError as error:
            scheduler.parked = [batch for slot in slots for batch in slot.batches]
            scheduler.give_up([slot.flight.record for slot in slots if slot.flight], str(error))
            raise


def _take_turns(scheduler: Scheduler, slots: Sequence[Microbatch]) -> None:
    engine = scheduler.engine
    stage, source = _stage(engine), engine.source
    assert isinstance(source, (FirstStageSource, ForwardedSource)), (
        "a stage hears of requests through the pipeline"
    )
    turn = 0
    while True:
        here, coming = slots[turn], slots[(turn + 1) % len(slots)]
        scheduler.running_batch, scheduler.last_batch = here.running, here.last
        scheduler.parked = [batch for slot in slots if slot is not here for batch in slot.batches]
        scheduler.receive()
        if source.over:
            scheduler.parked = ()
            return
        if scheduler.chunked_req is not None:
            engine.relay.barrier()
        batch = scheduler.get_next_batch_to_run()
        here.running, here.last = scheduler.running_batch, batch
        if stage.async_depth:
            _settle(scheduler, coming)
        if batch is not None:
            with engine.observer.range("turn", batch.step, turn):
                here.flight = _launch(scheduler, batch)
        if not stage.async_depth:
            _settle(scheduler, coming)
        if all(slot.idle for slot in slots) and not scheduler.rest() and stage.is_first:
            scheduler.parked = ()
            source.close()
            return
        turn = (turn + 1) % len(slots)


def _launch(scheduler: Scheduler, batch: ScheduleBatch) -> InFlightMicrobatch:
    """Run this stage's layers behind the one before, and send on what comes out."""
    engine = scheduler.engine
    stage, link, streams = _stage(engine), _link(engine), engine.streams
    with streams.on(streams.forward):
        streams.wait(streams.forward, streams.schedule)
        link.flush(OUTPUT if stage.is_last else PROXY)  # this forward may write to the same memory
        proxies = () if stage.is_first else _receive(engine, PROXY, batch.step)
        result, sent = launch_stage(engine, batch, proxies)
        silent = stage.skip_chunk_outputs and _is_chunk(batch)
        if not stage.is_last:
            link.send(stage.following, PROXY, batch.step, sent)
        elif not silent:
            link.send(stage.following, OUTPUT, batch.step, _outputs(result))
    return InFlightMicrobatch(batch, scheduler.launched(batch), result, silent)


def _is_chunk(batch: ScheduleBatch) -> bool:
    """Whether the step is nothing but an unfinished prompt."""
    return batch.forward_mode is ForwardMode.EXTEND and batch.reqs == [batch.chunked_req]


def _settle(scheduler: Scheduler, slot: Microbatch) -> None:
    """Take the microbatch's tokens as they come round, hand them on, and wait for them."""
    if slot.flight is None:
        return
    engine, flight = scheduler.engine, slot.flight
    batch, result, streams = flight.batch, flight.result, engine.streams
    with engine.observer.range("copy", batch.step, batch.batch_size):
        with streams.on(streams.copy):
            tokens, *scores = (
                _nothing(engine, result) if flight.silent else _come_round(engine, batch, result)
            )
            result.next_token_ids = tokens.to(torch.int64)
            result.next_token_logprobs = scores[0] if scores else None
            engine.relay.stash(result.future_indices, result.next_token_ids)
            engine.relay.conclude(batch, result)
            arrived = streams.module.Event()
            arrived.record()
        engine.relay.await_tokens(arrived)
    scheduler.settle(flight.record, result)
    slot.flight = None


def _come_round(engine: Engine, batch: ScheduleBatch, result: StepResult) -> Sequence[torch.Tensor]:
    """The step's tokens [b], and their logprobs where a request asked for them; to be read on the current stream."""
    stage, link = _stage(engine), _link(engine)
    if stage.is_last:
        engine.streams.copy.wait_event(result.copy_done)
        return _outputs(result)
    link.flush(OUTPUT)
    outputs = _receive(engine, OUTPUT, batch.step)
    if stage.index < stage.count - 2:
        link.send(stage.following, OUTPUT, batch.step, outputs)
    return outputs


def _receive(engine: Engine, tag: str, step: int) -> tuple[torch.Tensor, ...]:
    """What the stage before has of that step. Raises LinkError, too when it is another step's: one was lost."""
    stage = _stage(engine)
    message = _link(engine).receive(stage.preceding, tag)
    if message.value != step:
        raise LinkError(
            f"stage {stage.index} waited for '{tag}' of step {step} from stage {stage.preceding}, which sent that of "
            f"step {message.value}"
        )
    return message.tensors


def _nothing(engine: Engine, result: StepResult) -> Sequence[torch.Tensor]:
    """In place of the token that nobody reads. That it comes behind the forward is all the order that there is."""
    engine.streams.copy.wait_event(result.copy_done)
    return [torch.zeros(1, dtype=torch.int64, device=engine.config.device)]


def _outputs(result: StepResult) -> Sequence[torch.Tensor]:
    tokens, logprobs = result.next_token_ids, result.next_token_logprobs
    assert tokens is not None
    return [tokens] if logprobs is None else [tokens, logprobs]


def _stage(engine: Engine) -> Stage:
    assert engine.stage is not None
    return engine.stage


def _link(engine: Engine) -> Link:
    assert engine.link is not None
    return engine.link
