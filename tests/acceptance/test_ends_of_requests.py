"""How requests end besides finishing: refused because they can never run, or aborted by their clients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from schedbench.profiles.record.result import RequestRow, Result
from tests.acceptance.runs import SMALL, ends, known_result, result_of, statuses

LOOPS = ("engine.overlap=true", "engine.overlap=false")
FEW = (*SMALL, "workload.requests=8", "workload.output_tokens={dist: uniform, min: 12, max: 24}")


def aborting(after: int) -> Sequence[str]:
    return *FEW, f"workload.abort={{fraction: 0.5, after_tokens: {after}}}"


def by_status(result: Result, status: str) -> dict[str, RequestRow]:
    return {row.id: row for row in result.requests if row.status == status}


not_aborted = partial(known_result, "mixed", *FEW)


class TestAbort:
    def test_the_warm_up_may_lack_the_request_that_is_named(self) -> None:
        named = ("workload.abort={requests: [r7], after_tokens: 1}", "measure.warmup_requests=1")
        assert by_status(result_of("mixed", *FEW, *named), "aborted").keys() == {"r7"}

    @pytest.mark.parametrize(
        ("loop", "values", "after"),
        [*((loop, "none", after) for loop in LOOPS for after in (0, 1, 9)), (LOOPS[0], "real", 9)],
    )
    def test_aborted_requests_have_the_same_tokens_until_then(
        self, loop: str, values: str, after: int
    ) -> None:
        values = f"device.values={values}"
        whole = {row.id: row for row in not_aborted(values, loop).requests}
        result = result_of("mixed", *aborting(after), values, loop)
        aborted, finished = by_status(result, "aborted"), by_status(result, "finished")
        assert (len(aborted), len(finished)) == (4, 4)
        for row in aborted.values():
            assert row.reason == "aborted by its client"
            assert row.output_tokens == after
            assert row.token_ids == _first(whole[row.id], after)
        for row in finished.values():
            assert row.token_ids == whole[row.id].token_ids

    @pytest.mark.parametrize("loop", LOOPS)
    def test_a_request_that_is_aborted_among_drafts_ends_with_those_that_came_together(
        self, loop: str
    ) -> None:
        speculation = "engine.speculative={algorithm: eagle, mode: v2, acceptance: {mean: 3}}"
        drafting = ("model.preset=tiny-llama-eagle", "engine.mixed_chunk=false", speculation)
        result = result_of("mixed", *aborting(5), *drafting, "engine.relay=latest", loop)
        aborted = by_status(result, "aborted").values()
        assert [row.output_tokens for row in aborted] == [7] * 4  # of 1, 4, 7, ...


def _first(row: RequestRow, count: int) -> tuple[int, ...]:
    assert row.token_ids is not None
    return row.token_ids[:count]


SEVERAL = {
    "stages": "engine.pipeline.stages=2",
    "ranks": "engine.data_parallel.ranks=2",
    "replicas": "engine.replicas=2",
    "workers": "engine.disaggregation={mode: pair}",
}
REFUSING = (*FEW, "engine.kv_tokens=224", "workload.prompt_tokens={dist: uniform, min: 16, max: 120}")


@pytest.mark.parametrize("several", SEVERAL)
@pytest.mark.parametrize(
    ("how", "status"),
    [(aborting(0), "aborted"), (aborting(3), "aborted"), (REFUSING, "refused")],
    ids=["aborted at once", "aborted later", "too long"],
)
def test_requests_end_once_and_as_in_one_engine(several: str, how: Sequence[str], status: str) -> None:
    """The end of a request lets its client send another one."""
    base = (
        "model.preset=tiny-deep",
        "engine.overlap=auto",
        "engine.chunked_prefill_size=64",
        "workload.arrival={process: closed, concurrency: 3}",
    )
    result, alone = result_of("mixed", *how, *base, SEVERAL[several]), known_result("mixed", *how, *base)
    assert statuses(result) == {"finished", status}
    assert [row.id for row in result.requests] == [f"r{k}" for k in range(8)]
    assert ends(result) == ends(alone)
