"""SGLang's data-parallel ranks, from releases of which the clone of ``test_sglang.py`` has no commit."""

from __future__ import annotations

import pytest

from .conftest import findings
from .test_sglang import given_wheels, run

NONE = "device.values=none"


@given_wheels
@pytest.mark.parametrize(
    ("release", "ranks", "overrides"),
    [
        ("0.5.21", 2, (NONE,)),
        ("0.5.22", 2, (NONE,)),
        ("0.5.23", 2, ()),
        ("0.5.23", 2, (NONE, "engine.overlap=false")),
        ("0.5.23", 4, (NONE, "engine.page_size=16")),
    ],
    ids=["0.5.21", "0.5.22", "values", "serial", "four with pages"],
)
def test_ranks_give_the_tokens_of_one_and_step_together(
    release: str, ranks: int, overrides: tuple[str, ...]
) -> None:
    of_ranks = f"engine.data_parallel.ranks={ranks}"
    result = run(f"sglang=={release}", *overrides, of_ranks, hazards=not overrides)
    assert result.outputs == run(None, *overrides).outputs
    assert result.run.failure is None
    assert [rank.name for rank in result.ranks] == [f"rank {rank}" for rank in range(ranks)]
    steps = [
        {kind: counts.steps for kind, counts in rank.per_step.items() if kind != "decode.steady"}
        for rank in result.ranks
    ]
    assert len({sum(of.values()) for of in steps}) == 1
    assert all(of["idle"] for of in steps)
    if not overrides:
        assert {finding.resource for finding in findings(result)} == {"new_seq_lens_buf"}
