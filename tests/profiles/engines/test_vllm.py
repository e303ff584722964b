"""vLLM's own engine core, from its unpacked wheel or a checkout that is given by path::

SCHEDBENCH_VLLM=../vllm SCHEDBENCH_VLLM_PYTHON=../venv/bin/python make test
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from schedbench.profiles.engines.adapter import adapter_named
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.record.result import Hazards, Metric, Result

from .conftest import run_given

SOURCE = os.environ.get("SCHEDBENCH_VLLM", "")
PYTHON = os.environ.get("SCHEDBENCH_VLLM_PYTHON", sys.executable)
SMALL = (
    "workload.requests=6",
    "workload.output_tokens={dist: uniform, min: 4, max: 10}",
    "engine.page_size=16",
    "engine.relay=latest",
)
NONE = "device.values=none"
# Requests that outgrow the KV together.
GROWING = (
    "workload.prompt_tokens={dist: uniform, min: 16, max: 200}",
    "workload.output_tokens={dist: uniform, min: 60, max: 90}",
    "workload.arrival=burst",
    "engine.kv_tokens=640",
    NONE,
)

given = pytest.mark.skipif(not SOURCE, reason="SCHEDBENCH_VLLM names no source of vLLM")


def run(engine: bool, *overrides: str, **options: Any) -> Result:
    choice = EngineChoice(f"vllm:{SOURCE}", PYTHON, Path()) if engine else None
    return run_given(choice, *SMALL, *overrides, **options)


@pytest.mark.parametrize(
    "overrides",
    [["engine.mixed_chunk=false"], ["engine.page_size=1"], ["workload.sampling.prompt_logprobs=true"]],
)
def test_missing_features_are_refused(overrides: list[str]) -> None:
    needs = adapter_named("vllm").needs(ask("mixed", [*SMALL, *overrides]).scenario)
    assert needs and all("(" in need for need in needs)


@given
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("engine.overlap=false",),
        (NONE,),
        (NONE, "engine.cuda_graph=false", "engine.radix_cache=false"),
        GROWING,
    ],
)
def test_greedy_tokens_equal_our_schedulers(overrides: tuple[str, ...]) -> None:
    engine, ours = run(True, *overrides), [value for value in overrides if "kv_tokens" not in value]
    assert engine.outputs == run(False, *ours).outputs
    retractions = engine.metrics["retractions"]
    assert isinstance(retractions, Metric)
    assert bool(retractions.values[0]) == (overrides == GROWING)


@given
def test_every_decode_uploads_two_tensors_and_waits_for_the_tokens_of_the_step_before() -> None:
    steady = run(True, NONE).per_step["decode.steady"].streams
    schedule, copies = steady["schedule"], steady["copy"]
    assert (schedule["h2d_pinned"].median, "sync" in schedule) == (2, False)
    assert [copies[name].median for name in ("d2h_pinned", "sync")] == [2, 1]


@given
def test_vllm_has_no_hazards_and_the_same_tokens_under_an_adversary() -> None:
    found = run(True, NONE, hazards=True)
    assert isinstance(found.hazards, Hazards)
    assert not found.hazards.findings
    assert run(True, NONE, adversary=0).outputs == found.outputs


@given
def test_clients_may_abort() -> None:
    aborted = [r for r in run(True, NONE, "workload.abort.fraction=0.5").requests if r.status == "aborted"]
    assert aborted
