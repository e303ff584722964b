"""The load of decodes on the hardware: the sums of the kernels' costs, and how close a run comes to the limits."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from schedbench.profiles.measure.achieved import decode_load, decode_metrics, prompt_load, total
from schedbench.profiles.measure.distribution import Distribution
from schedbench.profiles.measure.requests import RequestRecord
from schedbench.profiles.platform.hardware import load as hardware
from schedbench.profiles.record.result import Abstained, Metric, Result
from schedbench.sched.model.config import PRESETS
from tests.acceptance.runs import result_of, value

PROMPTS = "prefill_flops"
NAMES = ("decode_batch_size", "decode_bandwidth", "decode_flops", "decode_roofline_ms")

BYTES, FLOPS = 0, 1
UNITS = ("gemm", "attention", "memory")
SMALL = (
    "workload.requests=12",
    "workload.arrival=burst",
    "engine.mixed_chunk=false",
    "workload.shared_prefix=null",
    "expect={}",
    "device.values=none",
)


@pytest.mark.parametrize("preset", ["tiny-qwen3", "llama-3-8b"])
def test_weights_are_read_once_a_step_and_keys_for_every_position(preset: str) -> None:
    """The norms are counted too; an embedding is a row per request."""
    model = PRESETS[preset]
    load, size = decode_load(model), model.dtype.itemsize
    read = model.num_parameters
    read -= 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    assert load["steps"][BYTES] == pytest.approx(read * size, rel=2e-2)
    assert load["requests"][FLOPS] == pytest.approx(2 * read, rel=1e-2)
    pages = 4  # of the page table, a layer
    assert load["positions"][BYTES] == model.num_layers * (2 * model.kv_size * size + pages)
    assert load["steps"][FLOPS] == 0


def test_load_is_proportional_to_requests() -> None:
    load = decode_load(PRESETS["tiny-llama"])
    assert total(load, steps=3, requests=5, positions=70)[BYTES] == (
        3 * load["steps"][BYTES] + 5 * load["requests"][BYTES] + 70 * load["positions"][BYTES]
    )


def test_load_of_a_prompt_follows_from_tokens_and_pairs() -> None:
    model = PRESETS["llama-3-8b"]
    load = prompt_load(model)
    norms = (2 * model.num_layers + 1) * model.hidden_size
    layers = model.num_parameters - norms - 2 * model.vocab_size * model.hidden_size
    assert load["tokens"][FLOPS] == 2 * layers
    assert load["requests"][FLOPS] == 2 * model.vocab_size * model.hidden_size
    assert load["pairs"][FLOPS] == 4 * model.num_layers * model.num_heads * model.head_dim


def _exactly(value: float) -> dict[str, float]:
    return {"value": value, "low": value, "high": value}


def ideal(path: Path, *, computes: bool = False) -> Path:
    """A profile whose kernels only move bytes, or only compute."""
    data: dict[str, Any] = hardware("h200").model_dump(exclude={"sha256"})
    kernels = data["kernels"]
    for name in ("fixed", "gap", "graph_gap"):
        kernels[name] |= _exactly(0.0)
    for rate in kernels["gemm_rates"].values():
        rate |= _exactly(1e9 if computes else 1e24)
    kernels["memory_bandwidth"] |= _exactly(1e18 if computes else 1e9)
    kernels["efficiency"] |= {name: {**_exactly(1.0), "unit": "1", "origin": "ideal"} for name in UNITS}
    path.write_text(yaml.safe_dump(data))
    return path


def test_a_device_that_only_moves_bytes_is_at_its_roofline(tmp_path: Path) -> None:
    """The emulator sums the same costs batch by batch; other launches of a step are small."""
    profile = ideal(tmp_path / "ideal.yaml")
    result = result_of("mixed", *SMALL, f"device.hardware={profile}", "engine.cuda_graph=false")
    roofline = value(result, "decode_roofline_ms")
    assert roofline <= value(result, "forward_ms.decode")
    assert roofline == pytest.approx(value(result, "forward_ms.decode"), rel=0.05)
    assert value(result, "decode_bandwidth") == pytest.approx(1.0, rel=0.05)
    assert 1 < value(result, "decode_batch_size") <= 12
    assert value(result, "decode_flops") > 0


def test_a_device_that_only_computes_is_at_its_rate(tmp_path: Path) -> None:
    """Cached prefixes are not computed, nor logits of embeddings."""
    profile = ideal(tmp_path / "ideal.yaml", computes=True)
    short = ("workload.prompt_tokens=2", "workload.shared_prefix=null", f"device.hardware={profile}")
    assert value(result_of("embedding", *short), PROMPTS) == pytest.approx(1e-3, rel=0.02)
    for prefix in ("null", "{groups: 2, tokens: 64}"):
        shared = (f"workload.shared_prefix={prefix}", "engine.policy=fcfs")
        result = result_of("mixed", *SMALL, *shared, f"device.hardware={profile}")
        assert value(result, PROMPTS) == pytest.approx(1e-3, rel=0.02)  # TFLOP/s


def test_prefill_rate_abstains_for_mixed_steps_and_scored_prompts() -> None:
    mixed = result_of("mixed", *SMALL, "engine.mixed_chunk=true").metrics[PROMPTS]
    assert mixed == Abstained(abstained="mixed with decodes")
    scored = result_of("logprobs", "workload.requests=2").metrics[PROMPTS]
    assert scored == Abstained(abstained="their log probabilities were computed, too")


def test_speculation_has_no_roofline_metrics() -> None:
    drafted = result_of(
        "spec_v2", "workload.requests=2", "workload.output_tokens={dist: uniform, min: 4, max: 8}"
    )
    assert not {*NAMES, PROMPTS} & drafted.metrics.keys()


def test_roofline_metrics_abstain_without_a_decode() -> None:
    single = "workload.output_tokens={dist: fixed, value: 1}"
    serial: Result = result_of("mixed", *SMALL, single, "engine.overlap=false")
    assert {name: serial.metrics[name] for name in NAMES} == dict.fromkeys(
        NAMES, Abstained(abstained="no decode ran")
    )
    overlapped = result_of("mixed", *SMALL, single)
    assert value(overlapped, "decode_batch_size") >= 1
    assert all(isinstance(overlapped.metrics[name], Abstained) for name in NAMES[1:])


def test_idle_between_steps_sums_to_forward_idle() -> None:
    result = result_of("mixed", *SMALL)
    idle, per_step = result.metrics["idle_ms"], value(result, "forward_idle_us_per_step")
    assert isinstance(idle, Metric) and idle.n is not None
    steps = idle.n + 1  # the first has nothing before it
    assert 1e3 * idle.values[0] * idle.n == pytest.approx(per_step * steps, rel=1e-6)


def test_the_load_follows_the_dtype() -> None:
    """Only the shape of the model is used: in float32 it reads twice as many bytes."""
    model = PRESETS["qwen3-0.6b"]
    wide = decode_load(replace(model, dtype_name="float32"))
    assert wide["steps"][BYTES] > 1.99 * decode_load(model)["steps"][BYTES]


def test_decodes_of_which_no_token_was_used_have_a_batch_size_and_no_traffic() -> None:
    """With overlap a decode is launched for requests whose first token turns out to be their last."""
    record = RequestRecord(
        id="a",
        index=0,
        arrival=0,
        first_scheduled=0,
        first_token=1,
        finish=2,
        prompt_tokens=10,
        cached_tokens=0,
        output_ids=array("q", [7]),
        status="finished",
        reason="length",
    )
    load, spans = decode_load(PRESETS["tiny-llama"]), Distribution([1000, 1000])
    found = decode_metrics(load, hardware("h200"), [record, record, record], spans=spans, requests=3)
    size = found.pop("decode_batch_size")
    assert isinstance(size, Metric) and size.values == (1.5,)
    assert found == dict.fromkeys(
        NAMES[1:], Abstained(abstained="no token of a decode was used, so that their contexts are not known")
    )
