"""The loop of one stage of a pipeline: microbatches take turns, each with a running batch of its own (upstream
``scheduler_pp_mixin``).

    stage 0   | mb 0 | mb 1 | mb 0 | ...      while stage 1 runs microbatch 0, stage 0 runs microbatch 1
    stage 1          | mb 0 | mb 1 | ...      tokens of mb 0 are sent last -> 0 -> 1 -> ... before its next turn

Every stage plans the same batches from the same requests. In its turn a microbatch is launched; then the loop waits for
the tokens of the microbatch whose turn is next, and settles it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..batch import ForwardMode, ScheduleBatch, StepResult
from ..link import Link, LinkError
from ..observe import NO_STEP, SLEEP
from ..pipeline import Stage, StageSource
from .engine import Engine
from .event_loops import Launched
from .launch import launch_stage
from .scheduler import Scheduler

PROXY, OUTPUT = "proxy", "output"


@dataclass(slots=True)
class Microbatch:
    running: ScheduleBatch = field(default_factory=ScheduleBatch.empty)
    last: ScheduleBatch | None = None
    in_flight: Launched | None = None  # ``last`` as it was launched, until its tokens have been received

    @property
    def batches(self) -> Sequence[ScheduleBatch]:
        return [self.running] if self.last is None else [self.running, self.last]

    @property
    def idle(self) -> bool:
        return self.in_flight is None and self.last is None and self.running.is_empty


def run_pipelined(scheduler: Scheduler) -> None:
    """Run until every request of the source has ended, on every stage. If another stage is gone, all requests of this
    stage are ended first; then LinkError is raised."""
    streams = scheduler.engine.streams
    slots = [Microbatch() for _ in range(_stage(scheduler.engine).microbatches)]
    with streams.on(streams.schedule):
        try:
            _take_turns(scheduler, slots)
        except LinkError as error:
            scheduler.parked = [batch for slot in slots for batch in slot.batches]
            scheduler.give_up([slot.in_flight[0] for slot in slots if slot.in_flight], str(error))
            raise


def _take_turns(scheduler: Scheduler, slots: Sequence[Microbatch]) -> None:
    engine = scheduler.engine
    stage, source = _stage(engine), engine.source
    assert isinstance(source, StageSource), "a stage receives its requests through the pipeline"
    turn = 0
    while True:
        current, following = slots[turn], slots[(turn + 1) % len(slots)]
        scheduler.running_batch, scheduler.last_batch = current.running, current.last
        scheduler.parked = [batch for slot in slots if slot is not current for batch in slot.batches]
        scheduler.receive()
        if source.over:
            return
        if scheduler.chunked_req is not None:
            engine.relay.barrier()
        batch = scheduler.get_next_batch_to_run()
        current.running, current.last = scheduler.running_batch, batch
        if stage.async_depth:
            _settle(scheduler, following)
        if batch is not None:
            with engine.observer.range("turn", batch.step, turn):
                current.in_flight = _launch(scheduler, batch)
        if not stage.async_depth:
            _settle(scheduler, following)
        if all(slot.idle for slot in slots) and not scheduler.rest():
            if stage.is_first:
                source.close()
                return
            with engine.observer.range(SLEEP, NO_STEP, 0):
                source.await_turn()
        turn = (turn + 1) % len(slots)


def _launch(scheduler: Scheduler, batch: ScheduleBatch) -> Launched:
    """Run this stage's layers on the preceding stage's output, and send the result on."""
    engine = scheduler.engine
    stage, link, streams = _stage(engine), _link(engine), engine.streams
    with streams.on(streams.forward):
        streams.wait(streams.forward, streams.schedule)
        link.flush(OUTPUT if stage.is_last else PROXY)  # this forward may write to the same memory
        proxies = () if stage.is_first else _receive(engine, PROXY, batch.step)
        result, sent = launch_stage(engine, batch, proxies)
        if not stage.is_last:
            link.send(stage.following, PROXY, batch.step, sent)
        elif not _skips_output(stage, batch):
            link.send(stage.following, OUTPUT, batch.step, _outputs(result))
    return scheduler.launched(batch), result


def _skips_output(stage: Stage, batch: ScheduleBatch) -> bool:
    """Whether the step's token is not sent: that of a single unfinished prompt is not used."""
    is_chunk = batch.forward_mode is ForwardMode.EXTEND and batch.reqs == [batch.chunked_req]
    return stage.skip_chunk_outputs and is_chunk


def _settle(scheduler: Scheduler, slot: Microbatch) -> None:
    """Receive the microbatch's tokens, send them on, wait for them, and settle the step."""
    batch, engine = slot.last, scheduler.engine
    if slot.in_flight is None or batch is None:
        return
    (record, result), streams = slot.in_flight, engine.streams
    with engine.observer.range("copy", batch.step, batch.batch_size):
        with streams.on(streams.copy):
            skips = _skips_output(_stage(engine), record)
            outputs = _placeholder(engine, result) if skips else _receive_outputs(engine, batch, result)
            tokens, *scores = outputs
            result.next_token_ids = tokens.to(torch.int64)
            result.next_token_logprobs = scores[0] if scores else None
            engine.relay.stash(result.future_indices, result.next_token_ids)
            engine.relay.conclude(batch, result)
            arrived = streams.module.Event()
            arrived.record()
        engine.relay.await_tokens(arrived)
    scheduler.settle(record, result)
    slot.in_flight = None


def _receive_outputs(engine: Engine, batch: ScheduleBatch, result: StepResult) -> Sequence[torch.Tensor]:
    """The step's tokens [b], and their logprobs if a request asked for them; valid on the current stream."""
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
    """Receive the preceding stage's tensors of ``step``. Raises LinkError, also if they belong to another step because
    a message was lost."""
    stage = _stage(engine)
    message = _link(engine).receive(stage.preceding, tag)
    if message.value != step:
        raise LinkError(
            f"stage {stage.index} waited for '{tag}' of step {step} from stage {stage.preceding}, which sent that of "
            f"step {message.value}"
        )
    return message.tensors


def _placeholder(engine: Engine, result: StepResult) -> Sequence[torch.Tensor]:
    """A stand-in for a token that is not sent and not used. Waiting for the forward keeps the order of the streams."""
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
