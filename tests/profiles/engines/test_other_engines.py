"""The schedulers of vLLM, mini-sglang and nano-vllm, from an unpacked wheel or checkouts that are given by path::

SCHEDBENCH_VLLM=../vllm SCHEDBENCH_VLLM_PYTHON=../venv/bin/python make test
SCHEDBENCH_MINI_SGLANG=../mini-sglang SCHEDBENCH_ENGINE_PYTHON=../venv/bin/python make test
SCHEDBENCH_NANO_VLLM=../nano-vllm SCHEDBENCH_ENGINE_PYTHON=../venv/bin/python make test
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from schedbench.profiles.engines.adapter import adapter_named
from schedbench.profiles.engines.paged import paged_inputs
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.record.result import Metric, Result

from .conftest import PYTHON, findings, run_given

SOURCES = {
    "vllm": os.environ.get("SCHEDBENCH_VLLM", ""),
    "mini-sglang": os.environ.get("SCHEDBENCH_MINI_SGLANG", ""),
    "nano-vllm": os.environ.get("SCHEDBENCH_NANO_VLLM", ""),
}
PYTHONS = {"vllm": os.environ.get("SCHEDBENCH_VLLM_PYTHON", sys.executable)}
EIGHT = ("workload.requests=8", "workload.output_tokens={dist: uniform, min: 4, max: 16}")
# What all runs of an engine have.
COMMON = {
    "vllm": (
        "workload.requests=6",
        "workload.output_tokens={dist: uniform, min: 4, max: 10}",
        "engine.page_size=16",
        "engine.relay=latest",
    ),
    "mini-sglang": (*EIGHT, "engine.mixed_chunk=false"),
    "nano-vllm": (*EIGHT, "engine.overlap=false", "engine.mixed_chunk=false", "engine.page_size=256"),
}
NONE = "device.values=none"
# Requests that outgrow the KV together.
GROWING = (
    "workload.prompt_tokens={dist: uniform, min: 16, max: 200}",
    "workload.output_tokens={dist: uniform, min: 60, max: 90}",
    "workload.arrival=burst",
    "engine.kv_tokens=640",
    NONE,
)
# Four requests that outgrow their first blocks, and five blocks.
GROWING_BLOCKS = (
    "workload.requests=4",
    "workload.arrival=burst",
    "workload.prompt_tokens={dist: fixed, value: 100}",
    "workload.output_tokens={dist: fixed, value: 100}",
    "engine.kv_tokens=1280",
    "workload.sampling.ignore_eos=true",
)


def given(name: str, *arguments: Any) -> Any:
    """Arguments of a test that needs the source of this engine."""
    reason = f"SCHEDBENCH_{name.upper().replace('-', '_')} names no source of {name}"
    return pytest.param(name, *arguments, marks=pytest.mark.skipif(not SOURCES[name], reason=reason))


def run(name: str, *overrides: str, ours: bool = False, **options: Any) -> Result:
    """Run the engine, or ``ours``, our scheduler with the same overrides."""
    choice = None if ours else EngineChoice(f"{name}:{SOURCES[name]}", PYTHONS.get(name, PYTHON), Path())
    return run_given(choice, *COMMON[name], *overrides, **options)


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("vllm", "engine.mixed_chunk=false"),
        ("vllm", "engine.page_size=1"),
        ("vllm", "workload.sampling.prompt_logprobs=true"),
        ("mini-sglang", "engine.mixed_chunk=true"),
        ("mini-sglang", "engine.page_size=16"),
        ("nano-vllm", "engine.overlap=true"),
        ("nano-vllm", "engine.mixed_chunk=true"),
        ("nano-vllm", "engine.page_size=16"),
        ("nano-vllm", "engine.radix_cache=false"),
    ],
)
def test_missing_features_are_refused(name: str, override: str) -> None:
    [need] = adapter_named(name).needs(ask("mixed", [*COMMON[name], override]).scenario)
    assert "(" in need


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


@pytest.mark.parametrize(
    ("name", "scenario", "overrides"),
    [
        given("vllm", "mixed", ()),
        given("vllm", "mixed", ("engine.overlap=false",)),
        given("vllm", "mixed", (NONE,)),
        given("vllm", "mixed", (NONE, "engine.cuda_graph=false", "engine.radix_cache=false")),
        given("vllm", "mixed", GROWING),
        given("mini-sglang", "mixed", ("engine.overlap=false",)),
        given("nano-vllm", "mixed", ()),
        given("nano-vllm", "mixed", ("engine.cuda_graph=false",)),
        given("nano-vllm", "shared_prefix", ()),
        given("nano-vllm", "mixed", GROWING_BLOCKS),
        given("nano-vllm", "throughput", ("workload.sampling.temperature=0", "engine.relay=pr25945")),
    ],
)
def test_greedy_tokens_equal_our_schedulers(name: str, scenario: str, overrides: tuple[str, ...]) -> None:
    """The engine retracts requests where they outgrow the KV, of which ours has as much as it takes."""
    engine = run(name, *overrides, scenario=scenario)
    enough = [override for override in overrides if "kv_tokens" not in override]
    assert engine.outputs == run(name, *enough, ours=True, scenario=scenario).outputs
    retractions = engine.metrics["retractions"]
    assert isinstance(retractions, Metric)
    assert bool(retractions.values[0]) == (overrides in (GROWING, GROWING_BLOCKS))


# Absent counts are None.
VLLMS = {
    ("schedule", "h2d_pinned"): 2,
    ("schedule", "sync"): None,
    ("copy", "d2h_pinned"): 2,
    ("copy", "sync"): 1,
}
MINI_SGLANGS = {
    ("schedule", "h2d_pinned"): 8,
    ("schedule", "sync"): None,
    ("forward", "d2h"): 1,
    ("forward", "sync"): 1,
}
NANO_VLLMS = {("schedule", "h2d_pinned"): 6, ("schedule", "d2h_pageable"): 1, ("schedule", "sync"): 1}


@pytest.mark.parametrize(
    ("name", "override", "statistic", "counts"),
    [
        given("vllm", NONE, "median", VLLMS),
        given("mini-sglang", "engine.cuda_graph=true", "max", MINI_SGLANGS),
        given("mini-sglang", "engine.cuda_graph=false", "max", MINI_SGLANGS),
        given("nano-vllm", "engine.cuda_graph=true", "max", NANO_VLLMS),
    ],
)
def test_every_decode_uploads_its_inputs_and_waits_once_for_tokens(
    name: str, override: str, statistic: str, counts: Mapping[tuple[str, str], int | None]
) -> None:
    streams = run(name, override).per_step["decode.steady"].streams
    found = {(stream, count): streams[stream].get(count) for stream, count in counts}
    assert {key: count and getattr(count, statistic) for key, count in found.items()} == counts


@pytest.mark.parametrize(("name", "values"), [given("vllm", NONE), given("nano-vllm", "device.values=real")])
def test_there_are_no_hazards_and_the_same_tokens_under_an_adversary(name: str, values: str) -> None:
    found = run(name, values, hazards=True)
    assert not findings(found)
    assert run(name, values, adversary=0).outputs == found.outputs


@pytest.mark.parametrize("name", [given("mini-sglang")])
def test_the_event_that_results_wait_for_is_recorded_before_the_last_read_of_the_batch(name: str) -> None:
    late = "self.token_pool[output_mapping] = forward_output.next_tokens_gpu"
    assert any(
        finding.resource.startswith("freed block of")
        and finding.first.site is not None
        and finding.first.site.statement == late
        for finding in findings(run(name, hazards=True))
    )


@pytest.mark.parametrize("name", [given("vllm")])
def test_clients_may_abort(name: str) -> None:
    requests = run(name, NONE, "workload.abort.fraction=0.5").requests
    assert [row for row in requests if row.status == "aborted"]
