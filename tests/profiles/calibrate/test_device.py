"""Constants from synthetic measurements of a machine whose constants are known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from schedbench.profiles.calibrate.calibration import to_yaml
from schedbench.profiles.calibrate.device import calibrated, device_constants
from schedbench.profiles.lab.probes import PROBES
from schedbench.profiles.platform.hardware import load

BASE = load("h200")  # torch_call 2000, launch 4000, a kernel's fixed part 1500
SIZES = (4, 4 << 10, 64 << 10, 128 << 10, 1 << 20, 64 << 20, 1 << 30)


def spread(ns: float) -> dict[str, float]:
    return {"n": 50, "min": ns, "p10": ns, "median": ns, "p90": ns}


def costs() -> dict[str, Any]:
    return {
        "launch": {"host_ns": spread(3000), "device_ns": 2300},
        "engine_kernels": {"small": spread(9000), "middle": spread(12000), "large": spread(20000)},
        "graphs": {
            str(n): {"host_ns": spread(5000 + 2 * n), "device_ns": 4000 + 1700 * n} for n in (10, 100, 500)
        },
        "events": {"record": spread(900), "wait": spread(700), "stream_synchronize_done": spread(2500)},
        "pinned": {"hit": spread(6000)},
    }


def copy(size: int, direction: str, memory: str) -> dict[str, Any]:
    pinned = memory == "pinned"
    call = 7000 if pinned else 6000 + size / 8  # 8 GB/s
    blocking = 9000 + size / (50 if pinned else 6)
    return {
        "bytes": size, "direction": direction, "host_memory": memory, "call_ns": spread(call),
        "blocking_ns": spread(blocking), "device_ns": 1200 + size / 55 if pinned else None,
    }  # fmt: skip


def copies() -> dict[str, Any]:
    where = [
        (size, way, memory) for size in SIZES for way in ("h2d", "d2h") for memory in ("pinned", "pageable")
    ]
    busy = [
        {"bytes": size, "direction": "h2d", "host_memory": "pageable", "waited": size > 65536}
        for size in (4096, 65536, 65540, 1 << 20)
    ]
    return {"idle": [copy(*row) for row in where], "behind_busy": busy}


def product(m: int, n: int, k: int, dtype: str = "bfloat16", *, share: float = 1.0) -> dict[str, Any]:
    """On a machine of 800 TFLOP/s and 4 TB/s; ``share`` of either."""
    flops, size = 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n)
    ns = max(flops / 8e14, size / 4e12) * 1e9 / share
    return {"m": m, "n": n, "k": k, "dtype": dtype, "device_ns": ns + (1500 if m < 8192 else 0)}


def attended(requests: int, new: int, before: int, share: float) -> dict[str, Any]:
    """On the same machine, with the pairs counted one by one."""
    pairs = requests * sum(before + token + 1 for token in range(new))
    flops = 4 * 32 * 128 * pairs
    shape = {"requests": requests, "new": new, "before": before, "dtype": "bfloat16"}
    return {**shape, "heads": 32, "kv_heads": 8, "head_dim": 128, "device_ns": 1500 + flops / 8e5 / share}


def kernels() -> dict[str, Any]:
    return {
        "copy": {"bytes": 1 << 31, "device_ns": (1 << 31) / 4e12 * 1e9},
        "peak": [product(8192, 8192, 8192, dtype) for dtype in ("bfloat16", "float16", "float32")],
        "gemm": [
            *(product(m, 4096, 4096, share=0.9) for m in (1, 16, 64)),
            *(product(m, 8192, 8192, share=0.75) for m in (1024, 2048, 4096)),
        ],
        "attention": [attended(64, 1, 1024, 0.01), attended(1, 2048, 0, 0.4), attended(4, 512, 2048, 0.4)],
    }


@pytest.fixture
def probes() -> dict[str, Any]:
    return {"costs": costs(), "copies": copies(), "kernels": kernels()}


def test_every_named_probe_exists() -> None:
    assert {"costs", "copies", "kernels"} <= set(PROBES)


def test_the_constants_of_a_known_machine_are_found(probes: dict[str, Any]) -> None:
    constants, missing = device_constants(BASE, probes)
    assert missing == []
    values = {constant.key: constant.value for constant in constants}
    expected = {
        "host.torch_call": 1000,  # a third of the whole, as in the base
        "host.launch": 2000,
        "host.kernel_call": 10000,
        "kernels.fixed": 1500,
        "kernels.gap": 800,
        "kernels.graph_gap": 200,
        "host.graph_launch": 5600,  # 300 nodes
        "host.event_record": 900,
        "host.event_wait": 700,
        "host.sync_return": 2500,
        "host.pin_memory": 6000,
        "copies.h2d_pinned": 55e9,
        "copies.d2h_pinned": 55e9,
        "copies.fixed": 1200,
        "host.copy_call": 6000,  # with the torch call above 7000
        "copies.h2d_pageable": 6e9,
        "copies.d2h_pageable": 6e9,
        "copies.host_memcpy": 8e9,
        "copies.pageable_inline": 65536,
        "kernels.memory_bandwidth": 4e12,
        "kernels.gemm_rates.bfloat16": 8e14,
        "kernels.gemm_rates.float16": 8e14,
        "kernels.gemm_rates.float32": 8e14,
        "kernels.efficiency.gemm": 0.75,
        "kernels.efficiency.memory": 0.9,
        "kernels.efficiency.attention": 0.4,
    }
    assert values == pytest.approx(expected, rel=0.01)


def test_a_replaced_constant_names_the_old_value(probes: dict[str, Any]) -> None:
    found = {c.key: c for c in device_constants(BASE, probes)[0]}
    assert found["host.launch"].old == 4000
    assert "shares" not in found["host.event_wait"].basis
    assert "50" in found["host.event_wait"].basis


def test_a_kernel_is_no_shorter_than_in_a_graph(probes: dict[str, Any]) -> None:
    for found in probes["costs"]["graphs"].values():
        found["device_ns"] /= 2
    values = {c.key: c.value for c in device_constants(BASE, probes)[0]}
    assert values["kernels.fixed"] == pytest.approx(850, rel=0.01)
    assert values["kernels.graph_gap"] == pytest.approx(0, abs=1)
    assert values["kernels.gap"] == pytest.approx(1450, rel=0.01)


def test_a_failed_group_loses_only_its_own_constants(probes: dict[str, Any]) -> None:
    probes["costs"]["events"] = {"error": "RuntimeError: no events"}
    constants, missing = device_constants(BASE, probes)
    assert missing == ["events: the probe costs does not have it (KeyError: 'record')"]
    keys = {constant.key for constant in constants}
    assert "host.event_record" not in keys
    assert "host.launch" in keys


@pytest.mark.parametrize("found", [{"error": "RuntimeError: no Triton"}, []])
def test_without_attention_its_efficiency_is_kept(probes: dict[str, Any], found: Any) -> None:
    probes["kernels"]["attention"] = found
    constants, missing = device_constants(BASE, probes)
    assert [line.split(":")[0] for line in missing] == ["attention"]
    assert "kernels.efficiency.gemm" in {constant.key for constant in constants}


def test_a_missing_probe_loses_only_its_own_constants(probes: dict[str, Any]) -> None:
    del probes["copies"]
    _, missing = device_constants(BASE, probes)
    assert [line.split(":")[0] for line in missing] == [
        "pinned copies",
        "inline size",
        "pageable copies",
    ]


@pytest.mark.parametrize("waits", [set(), {4096, 65536, 65540, 1 << 20}, {4096}])
def test_an_undetermined_inline_size_is_kept(probes: dict[str, Any], waits: set[int]) -> None:
    for row in probes["copies"]["behind_busy"]:
        row["waited"] = row["bytes"] in waits
    _, missing = device_constants(BASE, probes)
    assert [line.split(":")[0] for line in missing] == ["inline size"]


@pytest.mark.parametrize("ns", [-30.0, math.nan, 1e10])
def test_a_value_that_no_profile_can_have_is_missing(probes: dict[str, Any], ns: float) -> None:
    probes["costs"]["events"]["record"] = spread(ns)
    found, missing = device_constants(BASE, probes)
    assert missing == [
        f"events: the probe costs does not have it (ValueError: host.event_record would be {ns:.4g} ns)"
    ]
    assert "host.event_wait" not in {constant.key for constant in found}


def test_one_size_gives_no_line(probes: dict[str, Any]) -> None:
    probes["costs"]["graphs"] = {"100": probes["costs"]["graphs"]["100"]}
    _, missing = device_constants(BASE, probes)
    assert [line.split(":")[0] for line in missing] == ["launches", "graphs"]


def test_what_follows_from_other_constants_takes_those_of_this_machine(probes: dict[str, Any]) -> None:
    """The base has an inline size of 65536 B, and a kernel's fixed part of 1500 ns."""
    for row in probes["copies"]["behind_busy"]:
        row["waited"] = row["bytes"] > 4096
    for row in probes["copies"]["idle"]:
        row["call_ns"] = spread(7000 + row["bytes"] / 8 + 20_000 * (row["bytes"] > 4096))
    for found in probes["costs"]["graphs"].values():
        found["device_ns"] /= 2
    for row in probes["kernels"]["gemm"]:
        row["device_ns"] -= 650
    values = {c.key: c.value for c in device_constants(BASE, probes)[0]}
    assert values["copies.host_memcpy"] == pytest.approx(8e9, rel=0.01)
    assert values["kernels.efficiency.memory"] == pytest.approx(0.9, rel=0.01)


def test_all_constants_together_make_a_profile(probes: dict[str, Any], tmp_path: Any) -> None:
    found = device_constants(BASE, probes)[0]
    path = tmp_path / "ours.yaml"
    path.write_text(to_yaml(calibrated(BASE, found, machine="a machine", date="2026-01-02", name="ours")))
    profile = load(path)
    inline = profile.copies.pageable_inline
    assert (inline.value, inline.low) == (65536, 65536), "larger than 65536 B waits, and 65536 B does not"
    assert profile.kernels.gap.value == pytest.approx(800, rel=0.01)
    assert profile.kernels.efficiency.attention.value == pytest.approx(0.4)
    assert profile.host.launch.origin.startswith("measured on a machine, 2026-01-02, 3000 ns in one")
