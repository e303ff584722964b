"""Stages of a pipeline of SGLang beyond two plain ones, from a clone as in ``test_sglang.py``."""

from __future__ import annotations

import pytest

from schedbench.profiles.record.result import Metric

from .conftest import findings
from .test_sglang import AFTER, LATER, OWN, at, given, run

SERIAL = "engine.overlap=auto"
NONE = "device.values=none"
FOUR = ("model.preset=tiny-deep", NONE, SERIAL)
LONG = (
    *("model.preset=llama-3-8b", NONE, SERIAL),
    *("engine.chunked_prefill_size=2048", "engine.mixed_chunk=false"),
    *("workload.prompt_tokens={dist: uniform, min: 3000, max: 7000}", "workload.output_tokens=3"),
    *("engine.max_prefill_tokens=8192", "engine.kv_tokens=100000"),
)


@given
@pytest.mark.parametrize(
    ("overrides", "stages", "more"),
    [
        (FOUR, 4, ""),
        (FOUR, 4, ", async_depth: 2"),
        ((SERIAL,), 2, ""),
        ((SERIAL, NONE), 2, ""),
        ((SERIAL, "engine.page_size=16"), 2, ""),
        ((SERIAL, NONE), 2, ", async_depth: 1"),
        ((SERIAL, OWN), 2, ""),
        ((SERIAL, OWN, "engine.cuda_graph=false"), 2, ""),
    ],
    ids=str,
)
def test_stages_give_the_tokens_of_one(overrides: tuple[str, ...], stages: int, more: str) -> None:
    pipeline = f"engine.pipeline={{stages: {stages}{more}}}"
    staged = run(at(AFTER), *overrides, pipeline, hazards=True)
    single = [text for text in overrides if text not in (OWN, SERIAL)]
    assert staged.outputs == run(None, *single).outputs
    assert staged.run.failure is None
    assert {row.status for row in staged.requests} == {"finished"}
    tpot, bubble = staged.metrics["tpot_ms"], staged.metrics["bubble_pct"]
    assert isinstance(tpot, Metric) and isinstance(bubble, Metric)
    assert [rank.role for rank in staged.ranks] == ["pipeline"] * stages
    decodes = [rank.per_step["decode"] for rank in staged.ranks]
    assert len({decode.steps for decode in decodes}) == 1
    assert all(decode.streams["forward"]["kernel"].median > 0 for decode in decodes)


@given
def test_runs_of_stages_take_the_same_course() -> None:
    one, other = (run(at(AFTER), SERIAL, NONE, "engine.pipeline={stages: 2}") for _ in range(2))
    assert one.metrics == other.metrics
    assert one.ranks == other.ranks


@given
def test_dynamic_chunks_are_smaller_later_in_a_prompt_on_all_stages_alike() -> None:
    alike, dynamic = (
        run(at(LATER), *LONG, f"engine.pipeline={{stages: 2, dynamic_chunks: {on}}}")
        for on in ("false", "true")
    )
    assert dynamic.outputs == alike.outputs
    steps = [[rank.per_step["prefill"].steps for rank in result.ranks] for result in (alike, dynamic)]
    assert steps[0][0] == steps[0][1] < steps[1][0] == steps[1][1]


@given
def test_an_asynchronous_depth_frees_what_a_forward_still_reads() -> None:
    """Finding 7 of docs/findings.md."""
    found = findings(run(at(AFTER), *FOUR, "engine.pipeline={stages: 4, async_depth: 2}", hazards=True))
    freed = [one for one in found if one.resource.startswith("freed block of result of receive")]
    assert {finding.first.stream for finding in freed} == {"forward"}
