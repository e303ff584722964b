"""Stages of a pipeline of SGLang beyond two plain ones, from a clone as in ``test_sglang.py``."""

from __future__ import annotations

import pytest

from schedbench.profiles.engines.names import EngineError
from schedbench.profiles.record.result import Hazards, Metric

from .test_sglang import AFTER, CLONE, LATER, OWN, given, run

SERIAL = "engine.overlap=auto"
NONE = "device.values=none"
FOUR = ("model.preset=tiny-deep", NONE, SERIAL)
LONG = (
    *(
        "model.preset=llama-3-8b",
        NONE,
        SERIAL,
        "engine.chunked_prefill_size=2048",
        "engine.mixed_chunk=false",
    ),
    *("workload.prompt_tokens={dist: uniform, min: 3000, max: 7000}", "workload.output_tokens=3"),
    *("engine.max_prefill_tokens=8192", "engine.kv_tokens=100000"),
)


@given
@pytest.mark.parametrize(
    ("overrides", "pipeline"),
    [
        (FOUR, "{stages: 4}"),
        (FOUR, "{stages: 4, async_depth: 2}"),
        ((SERIAL, NONE), "{stages: 2, async_depth: 1}"),
        ((SERIAL, OWN), "{stages: 2}"),
        ((SERIAL, OWN, "engine.cuda_graph=false"), "{stages: 2}"),
    ],
    ids=["four", "four and a depth", "a depth", "own model runner", "own model runner, eager"],
)
def test_stages_give_the_tokens_of_one(overrides: tuple[str, ...], pipeline: str) -> None:
    staged = run(f"sglang:{CLONE}@{AFTER}", *overrides, f"engine.pipeline={pipeline}")
    single = [text for text in overrides if text not in (OWN, SERIAL)]
    assert staged.outputs == run(None, *single).outputs
    assert staged.run.failure is None
    tpot, bubble = staged.metrics["tpot_ms"], staged.metrics["bubble_pct"]
    assert isinstance(tpot, Metric) and isinstance(bubble, Metric)
    assert len({rank.per_step["decode"].steps for rank in staged.ranks}) == 1


@given
def test_runs_of_stages_take_the_same_course() -> None:
    one, other = (
        run(f"sglang:{CLONE}@{AFTER}", SERIAL, NONE, "engine.pipeline={stages: 2}") for _ in range(2)
    )
    assert one.metrics == other.metrics
    assert one.ranks == other.ranks


@given
def test_dynamic_chunks_are_smaller_later_in_a_prompt_on_all_stages_alike() -> None:
    engine = f"sglang:{CLONE}@{LATER}"
    alike, dynamic = (
        run(engine, *LONG, f"engine.pipeline={{stages: 2, dynamic_chunks: {on}}}") for on in ("false", "true")
    )
    assert dynamic.outputs == alike.outputs
    steps = [[rank.per_step["prefill"].steps for rank in result.ranks] for result in (alike, dynamic)]
    assert steps[0][0] == steps[0][1] < steps[1][0] == steps[1][1]


@given
@pytest.mark.parametrize(
    ("commit", "why"), [(AFTER, "Failed to profile prefill latency"), (LATER, "not positive")]
)
def test_dynamic_chunks_are_refused_where_sglang_goes_on_without_them(commit: str, why: str) -> None:
    """The forwards that are timed have no ids between #25945 and #26883; those of a small model show no curve."""
    with pytest.raises(EngineError, match=rf"chunks of one size \(ChunkSizePredictor.fit\): .*{why}"):
        run(f"sglang:{CLONE}@{commit}", SERIAL, NONE, "engine.pipeline={stages: 2, dynamic_chunks: true}")


@given
def test_an_asynchronous_depth_frees_what_a_forward_still_reads() -> None:
    """Finding 7 of docs/findings.md."""
    found = run(
        f"sglang:{CLONE}@{AFTER}", *FOUR, "engine.pipeline={stages: 4, async_depth: 2}", hazards=True
    ).hazards
    assert isinstance(found, Hazards)
    freed = [
        finding
        for finding in found.findings
        if finding.resource.startswith("freed block of result of receive")
    ]
    assert {finding.first.stream for finding in freed} == {"forward"}
