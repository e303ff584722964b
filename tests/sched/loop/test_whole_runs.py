"""Random engines, workloads and aborts: every request ends once with the right output, and no memory stays
allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedbench.sched.batch import ScheduleBatch
from schedbench.sched.config import EngineConfig, SamplingParams
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.memory.invariants import check
from schedbench.sched.request import Request, Status
from tests.sched.loop.cpu_engine import EOS, VOCAB, EngineRun, config, recalled_answer, request

CONTEXT = 192
# A token in eight is a stop token for requests that have any.
STOPS = tuple(range(0, VOCAB, 8))


@st.composite
def engines(draw: st.DrawFn) -> EngineConfig:
    page_size = draw(st.sampled_from([1, 4, 16]))
    chunk = draw(st.sampled_from([None, 7, 16, 33, 64, 100]))
    return config(
        overlap=draw(st.booleans()),
        mixed_chunk=draw(st.booleans()),
        chunked_prefill_size=chunk,
        max_prefill_tokens=draw(st.sampled_from([64, 16384])),
        page_size=page_size,
        radix_cache=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "lpm", "lof", "random"])),
        max_running_requests=draw(st.integers(1, 8)),
        kv_tokens=draw(st.integers(128, 400)) // page_size * page_size,
        context_len=CONTEXT,
        schedule_conservativeness=draw(st.sampled_from([0.05, 0.3, 1.0])),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    prefixes = [rng.integers(EOS + 1, VOCAB, 80).tolist() for _ in range(2)]
    gap = draw(st.sampled_from([0, 3000, 50_000]))
    made = []
    for index in range(draw(st.integers(1, 12))):
        shared = draw(st.sampled_from([0, 0, 16, 37, 80]))
        tokens = (
            draw(st.sampled_from(prefixes))[:shared]
            + rng.integers(EOS + 1, VOCAB, draw(st.integers(1 if shared else 0, 100))).tolist()
        )
        sampling = SamplingParams(
            stop_token_ids=draw(st.sampled_from([(), STOPS])), ignore_eos=draw(st.booleans())
        )
        most = draw(st.integers(1, 40))
        made.append(request(f"r{index}", tokens, most, arrival=index * gap, index=index, sampling=sampling))
    return made


def refused(req: Request, engine: EngineConfig) -> bool:
    length = len(req.origin_input_ids) + req.sampling.max_new_tokens
    return (
        not req.origin_input_ids
        or length > engine.context_len
        or length + engine.page_size >= engine.kv_tokens
    )


@dataclass
class Auditor:
    """Checks the scheduler between iterations; in iteration k it aborts the requests numbered ``aborts[k]``."""

    aborts: dict[int, list[int]] = field(default_factory=dict)
    iteration: int = 0
    aborted: set[str] = field(default_factory=set)

    def __call__(self, scheduler: Scheduler) -> None:
        for batch in (scheduler.running_batch, scheduler.last_batch):
            if batch is not None and not batch.is_empty:
                check_mirrors(batch)
        source = scheduler.engine.source
        live = [req for req in source.handed_out if req.req_pool_idx is not None]
        check(scheduler.engine.cache, live)
        check_places(scheduler, source.handed_out)
        for number in self.aborts.get(self.iteration, ()):
            if number < len(source.handed_out) and not source.handed_out[number].finished:
                scheduler.abort(source.handed_out[number], "a client went away")
                self.aborted.add(source.handed_out[number].id)
        self.iteration += 1


def check_mirrors(batch: ScheduleBatch) -> None:
    assert torch.equal(batch.seq_lens, batch.seq_lens_cpu)
    assert torch.equal(batch.req_pool_indices, batch.req_pool_indices_cpu)
    assert (
        batch.batch_size == len(batch.seq_lens) == len(batch.orig_seq_lens) == len(batch.sampling_info.params)
    )
    for req, row in zip(batch.reqs, batch.req_pool_indices_cpu.tolist(), strict=True):
        assert req.status is not Status.RUNNING or req.req_pool_idx == row


def check_places(scheduler: Scheduler, handed_out: Sequence[Request]) -> None:
    """A request that has not ended is waiting, running, just prefilled, or the one whose prompt is under way."""
    last = scheduler.last_batch
    prefilled = last.reqs if last is not None and last.forward_mode.is_extend else []
    chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
    running = {*scheduler.running_batch.reqs, *prefilled, *chunked}
    waiting = Counter(scheduler.waiting_queue)
    for req in handed_out:
        if req.status is Status.RUNNING:
            assert req in running and not waiting[req]
        else:
            assert waiting[req] == (req.status is Status.WAITING)


def check_nothing_left(engine_run: EngineRun) -> None:
    engine = engine_run.engine
    check(engine.cache, [])
    assert engine.cache.protected_size() == 0
    assert engine.allocator.available_size() + engine.cache.evictable_size() == engine.allocator.size
    engine.cache.evict(engine.allocator.size)
    assert engine.allocator.available_size() == engine.allocator.size
    for req in engine_run.source.ended_requests:
        assert req.req_pool_idx is None and req.last_node is None and req.prefix_indices is None
        assert req.kv_allocated_len == req.cache_protected_len == 0


def check_ending(req: Request, engine: EngineConfig, *, aborted: bool) -> None:
    output = list(req.output_ids)
    if refused(req, engine):
        assert req.status is Status.REFUSED and not output and req.reason
        return
    answer = recalled_answer(req)
    if aborted:
        assert req.status is Status.ABORTED and req.reason == "a client went away"
        assert output == answer[: len(output)]
        return
    assert req.status is Status.FINISHED
    assert output == answer
    assert req.reason == ("length" if len(answer) == req.sampling.max_new_tokens else "stop")
    assert req.arrival <= req.first_scheduled_at <= req.first_token_at <= req.finished_at


@pytest.mark.wide
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    engine=engines(),
    workload=workloads(),
    state=st.sampled_from(["latest", "pr25945"]),
    aborts=st.dictionaries(st.integers(0, 60), st.lists(st.integers(0, 11), max_size=3), max_size=4),
)
def test_every_request_ends_once_with_the_right_output(
    engine: EngineConfig, workload: list[Request], state: str, aborts: dict[int, list[int]]
) -> None:
    auditor = Auditor(aborts)
    engine_run = EngineRun(engine, state=state, recall=True, watch=auditor)
    engine_run.run(workload)
    assert Counter(req.id for req in engine_run.source.ended_requests) == {req.id: 1 for req in workload}
    for req in workload:
        check_ending(req, engine, aborted=req.id in auditor.aborted)
    check_nothing_left(engine_run)
