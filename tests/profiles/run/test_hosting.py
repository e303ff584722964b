"""Settings of KV on the host: every invalid key is named with what was expected."""

from __future__ import annotations

import pytest
import torch

from schedbench.profiles.platform.capacity import needed_bytes
from schedbench.profiles.platform.machine import MachineError
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.run.machines import device_kind
from schedbench.scenarios.problems import ScenarioError


def refused(*overrides: str) -> str:
    with pytest.raises(ScenarioError) as error:
        ask("hisparse", overrides)
    return "\n".join(str(problem) for problem in error.value.problems)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.preset=tiny-llama", "tiny-llama attends to all tokens"),
        ("device.hardware=mlx-like", "mlx-like has no pinned memory, no side streams, no events"),
        ("engine.hisparse.top_k=64", "expected 32, the model's own, got 64"),
        (
            "engine.hisparse.device_buffer_size=16",
            "expected at least the 32 tokens that the model attends to, got 16",
        ),
        ("engine.hisparse.device_buffer_size=40", "expected whole pages of 16, got 40"),
        ("engine.hisparse.device_buffer_size=32768", "expected less than 32768, got 32768"),
        ("engine.hisparse.host_ratio=0.5", "host_ratio"),
        ("engine.hisparse.selection={reuse: 1.5}", "reuse"),
        ("engine.radix_cache=true", "hot buffers belong to one request, prefixes to many"),
        ("engine.mixed_chunk=true", "decodes mixed into a chunk would not run on"),
    ],
)
def test_an_invalid_setting_is_refused_with_its_key(override: str, says: str) -> None:
    assert says in refused(override)


def test_all_problems_are_reported_at_once() -> None:
    said = refused(
        "engine.hisparse.top_k=64", "engine.hisparse.device_buffer_size=8", "device.hardware=mlx-like"
    )
    assert all(word in said for word in ("top_k", "device_buffer_size", "mlx-like"))


def test_sizes_follow_from_the_model_by_default() -> None:
    hisparse = ask("hisparse", ["engine.hisparse={enabled: true, top_k: 32}"]).scenario.engine.hisparse
    assert hisparse.buffer_size(32) == 64


def test_memory_on_the_host_is_counted() -> None:
    sizes = [
        needed_bytes(ask("hisparse", [f"engine.hisparse.{key}"]))
        for key in ("enabled=false", "host_ratio=1.0", "host_ratio=8.0")
    ]
    assert sizes == sorted(sizes) and sizes[2] - sizes[1] > 7 * 4096 * 2 * 2 * 2 * 32 * 4


def test_cuda_needs_kernels_that_read_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    scenario = ask("hisparse").scenario
    assert device_kind("auto", scenario) == "cuda"
    with pytest.raises(MachineError, match="those for float64 do not"):
        device_kind("cuda", ask("hisparse", ["model.dtype=float64"]).scenario)
    monkeypatch.setattr("schedbench.profiles.run.machines.find_spec", lambda _: None)
    assert device_kind("auto", scenario) == "vgpu" and device_kind("auto", ask("mixed").scenario) == "cuda"
    with pytest.raises(MachineError, match="Triton is not installed"):
        device_kind("cuda", scenario)
