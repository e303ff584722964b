"""SGLang's data-parallel ranks, from a release that has no commit in the clone of ``test_sglang.py``: the folder
``SCHEDBENCH_SGLANG_WHEELS`` has the wheel of 0.5.23."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from schedbench.profiles.engines.names import EngineError
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Hazards, Result

from .test_sglang import AFTER, CLONE, LATER, PYTHON, SMALL, ended_engines, given, run

__all__ = ["ended_engines"]  # a fixture

WHEELS = os.environ.get("SCHEDBENCH_SGLANG_WHEELS", "")
NONE = "device.values=none"

released = pytest.mark.skipif(
    not WHEELS, reason="SCHEDBENCH_SGLANG_WHEELS names no folder with a wheel of SGLang"
)


def run_release(*overrides: str, hazards: bool = False) -> Result:
    choice = EngineChoice("sglang==0.5.23", PYTHON, Path(WHEELS))
    question = replace(ask("mixed", [*SMALL, *overrides]), engine=choice)
    return execute(question, question.relays[0], Options(device="vgpu", hazards=hazards)).result


@released
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [(2, ()), (2, (NONE, "engine.overlap=false")), (4, (NONE, "engine.page_size=16"))],
    ids=["values", "serial", "four with pages"],
)
def test_ranks_give_the_tokens_of_one_and_step_together(ranks: int, overrides: tuple[str, ...]) -> None:
    result = run_release(*overrides, f"engine.data_parallel.ranks={ranks}", hazards=not overrides)
    assert result.outputs == run(None, *overrides).outputs
    assert result.run.failure is None
    assert [rank.name for rank in result.ranks] == [f"rank {rank}" for rank in range(ranks)]
    steps = [
        {kind: counts.steps for kind, counts in rank.per_step.items() if kind != "decode.steady"}
        for rank in result.ranks
    ]
    assert len({sum(of.values()) for of in steps}) == 1
    assert all(of["idle"] for of in steps)
    if isinstance(result.hazards, Hazards):
        assert {finding.resource for finding in result.hazards.findings} == {"new_seq_lens_buf"}


@given
@pytest.mark.parametrize("commit", [AFTER, LATER])
def test_ranks_of_versions_with_groups_of_their_own_are_refused(commit: str) -> None:
    with pytest.raises(EngineError, match="initialize_dp_attention"):
        run(f"sglang:{CLONE}@{commit}", "engine.data_parallel.ranks=2")
