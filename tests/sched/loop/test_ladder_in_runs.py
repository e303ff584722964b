"""Every state of the ladder in whole runs, with a model whose answers can be predicted."""

from __future__ import annotations

import pytest

from schedbench.sched.config import SamplingParams
from schedbench.sched.relay.states import states
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

STATES = pytest.mark.parametrize("state", states())
BARRIERS = pytest.mark.parametrize("barrier", ["off", "top", "after-launch", "read-done"])


@pytest.mark.wide
@STATES
@LOOPS
@pytest.mark.parametrize("page_size", [1, 4])
def test_retracted_chunked_and_mixed(state: str, overlap: bool, page_size: int) -> None:
    recorder = RunRecorder()
    engine = config(
        overlap=overlap,
        page_size=page_size,
        kv_tokens=200,
        schedule_conservativeness=0.02,
        mixed_chunk=True,
        chunked_prefill_size=20,
    )
    engine_run = EngineRun(engine, state=state, recall=True, observer=recorder)
    done = engine_run.run(requests(30, prompt=(4, 60), output=(8, 40), shared=16))
    assert recorder.retractions and recorder.kinds == {"prefill", "mixed", "decode"}
    check_answers(done)


@STATES
@LOOPS
def test_without_chunks_or_cache(state: str, overlap: bool) -> None:
    engine = config(overlap=overlap, radix_cache=False, chunked_prefill_size=None)
    done = EngineRun(engine, state=state, recall=True).run(requests(12, every_ns=3000))
    check_answers(done)


@STATES
@LOOPS
def test_delayed_samples(state: str, overlap: bool) -> None:
    """Some steps sample at once and some late, in one run."""
    sampling = SamplingParams(grammar=("choice", ("no", "perhaps")))
    spelled = [
        request(f"g{i}", range(300, 320), 10, sampling=sampling, arrival=9000 * i, index=i) for i in range(3)
    ]
    plain = requests(4, prompt=(4, 40), output=(20, 40))
    EngineRun(config(overlap=overlap, mixed_chunk=True), state=state, recall=True).run([*plain, *spelled])
    check_answers(plain)
    assert all(req.status is Status.FINISHED for req in spelled)
    assert all(bytes(list(req.output_ids[:-1])) in (b"no", b"perhaps") for req in spelled)


@STATES
@BARRIERS
def test_any_barrier(state: str, barrier: str) -> None:
    engine_run = EngineRun(config(mixed_chunk=True), state=state, switches={"barrier": barrier}, recall=True)
    done = engine_run.run(requests(10, every_ns=3000))
    check_answers(done)


@pytest.mark.parametrize("state", ["pr25774-before", "pr26020", "pr25945"])
@pytest.mark.parametrize(
    "switch",
    [("preparation", "fused"), ("flatten", "numpy"), ("staging", "pageable"), ("penalties", "exact")],
)
def test_switches_that_change_no_token(state: str, switch: tuple[str, str]) -> None:
    engine_run = EngineRun(
        config(mixed_chunk=True, page_size=4), state=state, switches=dict([switch]), recall=True
    )
    done = engine_run.run(requests(10, every_ns=3000))
    check_answers(done)


def test_the_ring_wraps_around_without_losing_a_token() -> None:
    """There are more steps than the ring has slots; its limit counts what can be pending."""
    engine = config(max_running_requests=2, chunked_prefill_size=64)
    engine_run = EngineRun(engine, state="pr25774", recall=True)
    done = engine_run.run(requests(12, prompt=(100, 150), output=(40, 60)))
    tokens = sum(len(req.output_ids) for req in done)
    assert tokens > 2 * engine_run.engine.relay.context.futures.output_tokens_buf.shape[0]
    check_answers(done)
