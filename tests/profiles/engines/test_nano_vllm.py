"""nano-vllm's own scheduler, from a checkout that is given by path::

SCHEDBENCH_NANO_VLLM=../nano-vllm SCHEDBENCH_ENGINE_PYTHON=../venv/bin/python make test
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from schedbench.profiles.engines.adapter import adapter_named
from schedbench.profiles.engines.paged import paged_inputs
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.record.result import Hazards, Metric, Result

from .conftest import PYTHON, run_given

CHECKOUT = os.environ.get("SCHEDBENCH_NANO_VLLM", "")
SERIAL = ("engine.overlap=false", "engine.mixed_chunk=false", "engine.page_size=256")
# Four requests that outgrow their first blocks, and five blocks.
GROWING = (
    "workload.requests=4",
    "workload.arrival=burst",
    "workload.prompt_tokens={dist: fixed, value: 100}",
    "workload.output_tokens={dist: fixed, value: 100}",
    "engine.kv_tokens=1280",
    "workload.sampling.ignore_eos=true",
)
SMALL = ("workload.requests=8", "workload.output_tokens={dist: uniform, min: 4, max: 16}")

given = pytest.mark.skipif(not CHECKOUT, reason="SCHEDBENCH_NANO_VLLM names no checkout of nano-vllm")


def run(engine: bool, *overrides: str, **options: Any) -> Result:
    choice = EngineChoice(f"nano-vllm:{CHECKOUT}", PYTHON, Path()) if engine else None
    return run_given(choice, *SERIAL, *SMALL, *overrides, **options)


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.overlap=true"],
        ["engine.mixed_chunk=true"],
        ["engine.page_size=16"],
        ["engine.radix_cache=false"],
    ],
)
def test_missing_features_are_refused(overrides: list[str]) -> None:
    needs = adapter_named("nano-vllm").needs(ask("mixed", [*SERIAL, *overrides]).scenario)
    assert needs and all("(" in need for need in needs)


def test_a_decode_reads_the_slots_of_its_blocks_and_padding_writes_to_a_spare_one() -> None:
    blocks = torch.tensor([[3, 1], [2, -1], [-1, -1]], dtype=torch.int32)
    lens, slots = torch.tensor([6, 4, 0]), torch.tensor([5, 11, -1], dtype=torch.int32)
    written, seq_lens, _, rows, pages = paged_inputs(slots, None, lens.int(), blocks, 4, 99, 8)
    assert (written.tolist(), seq_lens.tolist(), rows.tolist()) == ([5, 11, 99], [6, 4, 1], [0, 1, 2])
    assert pages[0, :6].tolist() == [12, 13, 14, 15, 4, 5]
    assert pages[1, :4].tolist() == [8, 9, 10, 11]


def test_prompts_without_a_cached_prefix_read_what_they_write() -> None:
    ends, slots = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([8, 9, 4, 5, 6], dtype=torch.int32)
    written, lens, new, _, pages = paged_inputs(slots, ends, ends, None, 4, 99, 3)
    assert (written.tolist(), lens.tolist(), new.tolist()) == ([8, 9, 4, 5, 6], [2, 3], [2, 3])
    assert (pages[0, :2].tolist(), pages[1].tolist()) == ([8, 9], [4, 5, 6])


@given
@pytest.mark.parametrize(
    ("scenario", "overrides"),
    [
        ("mixed", ()),
        ("mixed", ("engine.cuda_graph=false",)),
        ("shared_prefix", ()),
        ("mixed", GROWING),
        ("throughput", ("workload.sampling.temperature=0", "engine.relay=pr25945")),
    ],
)
def test_greedy_tokens_equal_our_schedulers(scenario: str, overrides: tuple[str, ...]) -> None:
    engine = run(True, *overrides, scenario=scenario)
    assert engine.outputs == run(False, *overrides, scenario=scenario).outputs
    retractions = engine.metrics["retractions"]
    assert isinstance(retractions, Metric)
    assert bool(retractions.values[0]) == (overrides == GROWING)


@given
def test_every_decode_uploads_its_inputs_and_the_host_waits_for_the_tokens() -> None:
    steady = run(True).per_step["decode.steady"].streams["schedule"]
    assert {name: steady[name].max for name in ("h2d_pinned", "d2h_pageable", "sync")} == {
        "h2d_pinned": 6,
        "d2h_pageable": 1,
        "sync": 1,
    }


@given
def test_nano_vllm_has_no_hazards() -> None:
    hazards = run(True, hazards=True).hazards
    assert isinstance(hazards, Hazards)
    assert not hazards.findings
