"""A pipeline whose chunk sizes follow measured latencies: the same tokens, sooner."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.acceptance.runs import digest_of, known_result, result_of, schedbench, value

LONG = (
    "engine.pipeline.stages=4",
    "engine.chunked_prefill_size=8192",
    "workload.prompt_tokens=32768",
    "workload.requests=1",
    "engine.kv_tokens=40000",
)
DYNAMIC = "engine.pipeline.dynamic_chunks=true"


run = partial(known_result, "cases/pp-chunked", *LONG)


@pytest.mark.wide
def test_dynamic_chunks_give_the_same_tokens_sooner() -> None:
    assert digest_of(run(DYNAMIC)) == digest_of(run())
    assert value(run(DYNAMIC), "ttft_ms") < 0.9 * value(run(), "ttft_ms")
    assert value(run(DYNAMIC), "bubble_pct") < value(run(), "bubble_pct")
    assert run(DYNAMIC).per_step["prefill"].steps > run().per_step["prefill"].steps == 4


def test_without_smoothing_sizes_stay_equal() -> None:
    flat = run(DYNAMIC, "engine.pipeline.smooth_factor=0")
    assert flat.per_step["prefill"].steps == run().per_step["prefill"].steps
    assert value(flat, "ttft_ms") == pytest.approx(value(run(), "ttft_ms"), rel=1e-3)


@pytest.mark.wide
@pytest.mark.parametrize("state", ["latest", "pr25774-before", "pr25945"])
def test_trial_forwards_leave_no_state_behind(state: str) -> None:
    """The prompts share with the trials what they wrote to: rows, pages, cache and relay. Values are real."""
    small = (
        "model.preset=tiny-deep",
        "workload.requests=5",
        "engine.overlap=auto",
        "engine.chunked_prefill_size=128",
        "engine.page_size=16",
        f"engine.relay={state}",
    )
    stages = ("engine.pipeline.stages=2", DYNAMIC)
    assert digest_of(result_of("mixed", *small, *stages)) == digest_of(result_of("mixed", *small))


@pytest.mark.wide
def test_processes_use_the_same_sizes() -> None:
    sets = (DYNAMIC, "engine.pipeline.stages=2", "workload.prompt_tokens=16384")
    here = run(*sets)
    overrides = [f"--set={key}" for key in (*LONG, *sets)]
    done = schedbench("run", "cases/pp-chunked", *overrides, "--world", "distributed", "--format", "json")
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    assert there["outputs"]["digest"] == digest_of(here)
    assert there["per_step"]["prefill"]["steps"] == here.per_step["prefill"].steps > 2
