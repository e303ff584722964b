"""The relay inside a run: empty batches, delayed samples, and no token gathered before it was stashed."""

from __future__ import annotations

import pytest
import torch

from schedbench.sched.batch import ForwardMode, ScheduleBatch
from schedbench.sched.config import SamplingParams
from schedbench.sched.loop.launch import make_forward_batch
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.relay.context import UNSTASHED
from schedbench.sched.request import Status
from tests.sched.loop.cpu_engine import (
    LOOPS,
    EngineRun,
    RunRecorder,
    check_answers,
    config,
    request,
    requests,
)


def check_rows(scheduler: Scheduler) -> None:
    """A batch that was filtered to nothing keeps stale tensors; had it been merged, there would be more rows than
    requests."""
    for batch in (scheduler.running_batch, scheduler.last_batch):
        if batch is not None and not batch.is_empty:
            assert len(batch.reqs) == batch.seq_lens.shape[0] == batch.req_pool_indices.shape[0]


@LOOPS
def test_a_prefill_whose_requests_all_ended_is_not_merged(overlap: bool) -> None:
    """One-token requests end with their prefill, which then has no request left to merge into the running batch."""
    recorder = RunRecorder()
    crowd = [request(f"r{i}", range(300 + i, 310 + i), 1, arrival=12_000 * i, index=i) for i in range(8)]
    steady = request("steady", range(400, 420), 30)
    engine_run = EngineRun(config(overlap=overlap), recall=True, watch=check_rows, observer=recorder)
    engine_run.run([steady, *crowd])
    check_answers([steady, *crowd])
    kinds = [info.kind for info in recorder.launches]
    assert "prefill" in kinds[kinds.index("decode") :]


def test_an_emptied_batch_is_replaced_not_merged() -> None:
    first = request("first", range(300, 310), 3)
    second = request("second", range(330, 340), 3, arrival=60_000)
    EngineRun(config(), recall=True, watch=check_rows).run([first, second])
    check_answers([second])


class Stashes:
    """Records what the relay's rows held at the top of each iteration."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, scheduler: Scheduler) -> None:
        self.seen.append(scheduler.engine.relay.context.futures.output_tokens_buf.tolist())


@LOOPS
def test_a_delayed_sample_is_stashed_before_the_next_step(overlap: bool) -> None:
    """The recalling model refuses a token that was not stashed; the grammar's mask needs the previous token."""
    stashes = Stashes()
    sampling = SamplingParams(grammar=("choice", ("perhaps",)))
    spelled = request("spelled", range(300, 320), 10, sampling=sampling)
    EngineRun(config(overlap=overlap, max_running_requests=1), recall=True, watch=stashes).run([spelled])
    assert spelled.status is Status.FINISHED and bytes(list(spelled.output_ids[:-1])) == b"perhaps"
    after_first = [row[1] for row in stashes.seen if row[1] != UNSTASHED]
    assert after_first[: len(spelled.output_ids)] == list(spelled.output_ids)


def test_a_forward_without_input_says_so() -> None:
    engine_run = EngineRun(config(), recall=True)
    engine_run.scheduler([])
    batch = ScheduleBatch(reqs=[], forward_mode=ForwardMode.DECODE, step=7)
    with pytest.raises(ValueError, match="step 7 has no input ids: its relay was not resolved"):
        make_forward_batch(engine_run.engine, batch)


def test_logprob_requests_are_not_mixed() -> None:
    recorder = RunRecorder()
    sampling = SamplingParams(logprobs=True)
    done = EngineRun(config(mixed_chunk=True), recall=True, observer=recorder).run(
        requests(8, every_ns=3000, sampling=sampling)
    )
    assert recorder.kinds == {"prefill", "decode"}
    check_answers(done)


def test_two_streams_of_one_device_are_one() -> None:
    engine_run = EngineRun(config(), recall=True)
    engine_run.run(requests(2))
    streams = engine_run.engine.streams
    assert streams.schedule is streams.forward is streams.copy
    assert torch.get_device_module(engine_run.config.device) is streams.module
