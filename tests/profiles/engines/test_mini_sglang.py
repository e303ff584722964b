"""mini-sglang's own scheduler, from a checkout that is given by path::

SCHEDBENCH_MINI_SGLANG=../mini-sglang SCHEDBENCH_ENGINE_PYTHON=../venv/bin/python make test
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from schedbench.profiles.engines.adapter import adapter_named
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.record.result import Hazards, Result

from .conftest import PYTHON, run_given

CHECKOUT = os.environ.get("SCHEDBENCH_MINI_SGLANG", "")
SMALL = (
    "engine.mixed_chunk=false",
    "workload.requests=8",
    "workload.output_tokens={dist: uniform, min: 4, max: 16}",
)

given = pytest.mark.skipif(not CHECKOUT, reason="SCHEDBENCH_MINI_SGLANG names no checkout of mini-sglang")


def run(engine: bool, *overrides: str, **options: Any) -> Result:
    choice = EngineChoice(f"mini-sglang:{CHECKOUT}", PYTHON, Path()) if engine else None
    return run_given(choice, *SMALL, *overrides, **options)


@pytest.mark.parametrize("override", ["engine.mixed_chunk=true", "engine.page_size=16"])
def test_missing_features_are_refused(override: str) -> None:
    needs = adapter_named("mini-sglang").needs(ask("mixed", [override]).scenario)
    assert needs and all("(" in need for need in needs)


@given
def test_without_overlap_greedy_tokens_equal_our_schedulers() -> None:
    serial = "engine.overlap=false"
    assert run(True, serial).outputs == run(False, serial).outputs


@given
@pytest.mark.parametrize("graphs", ["true", "false"])
def test_a_steady_decode_uploads_eight_times_and_waits_once(graphs: str) -> None:
    steady = run(True, f"engine.cuda_graph={graphs}").per_step["decode.steady"].streams
    assert steady["schedule"]["h2d_pinned"].max == 8
    assert (steady["forward"]["d2h"].max, steady["forward"]["sync"].max) == (1, 1)
    assert "sync" not in steady["schedule"]


@given
def test_the_event_that_results_wait_for_is_recorded_before_the_last_read_of_the_batch() -> None:
    hazards = run(True, hazards=True).hazards
    assert isinstance(hazards, Hazards)
    late = "self.token_pool[output_mapping] = forward_output.next_tokens_gpu"
    assert any(
        finding.resource.startswith("freed block of")
        and finding.first.site is not None
        and finding.first.site.statement == late
        for finding in hazards.findings
    )
