"""Hardware profiles: every number has an origin, and errors say what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel

from schedbench.profiles.platform.hardware import HardwareError, Quantity, load, names
from schedbench.profiles.vgpu.cost import Costs
from schedbench.profiles.vgpu.gpu import open_vgpu
from schedbench.sched.kernels.declare import Work
from schedbench.sched.observe import RANGES


def _quantities(node: Any) -> list[Quantity[float]]:
    if isinstance(node, Quantity):
        return [node]
    values = (
        node.values()
        if isinstance(node, dict)
        else [v for _, v in node]
        if isinstance(node, BaseModel)
        else ()
    )
    return [quantity for value in values for quantity in _quantities(value)]


@pytest.mark.parametrize("name", names())
def test_shipped_profiles_give_an_origin_of_every_number(name: str) -> None:
    profile = load(name)
    assert profile.name == name and len(profile.sha256) == 64
    assert set(profile.phases) == set(RANGES)
    origins = [quantity.origin for quantity in _quantities(profile)]
    assert len(origins) > 40
    assert all(origin.split()[0].rstrip(":") in _KINDS for origin in origins)


_KINDS = {"measured", "published", "datasheet", "estimate", "assumed", "folklore,", "the", "not"}


def test_names_and_capabilities() -> None:
    assert list(names()) == ["a100", "h100", "h200", "mlx-like"]
    assert load("h200").capabilities.side_streams
    lacking = load("mlx-like").capabilities
    assert not (lacking.pinned_memory or lacking.side_streams or lacking.events or lacking.graphs)


def test_a_profile_of_the_user_is_loaded(tmp_path: Path) -> None:
    document = _document()
    assert list(load("h200").phases) == list(document["phases"])  # draws are made in this order
    document["name"] = "mine"
    document["copies"]["fixed"] |= {"value": 3000, "high": 4000}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document))
    assert load(path).name == "mine" and load(str(path)).copies.fixed.value == 3000
    assert load(path).sha256 != load("h200").sha256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a mapping, got nothing"),
        ("[1, 2]", "expected a mapping, got a list"),
        ("a: [", "not YAML"),
        ("name: x", "kernels: required, but not given(?s:.)*copies: required, but not given"),
        ("\x00", "not YAML"),
    ],
)
def test_invalid_files_are_refused_with_their_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    with pytest.raises(HardwareError, match=message):
        load(path)


def test_a_value_lies_within_its_range(tmp_path: Path) -> None:
    document = _document()
    document["copies"]["fixed"] |= {"low": 1600}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(
        HardwareError, match=r"copies.fixed: expected low <= value <= high, got 1600, 1500, 3000"
    ):
        load(path)


@pytest.mark.parametrize("name", names())
def test_an_estimate_says_how_it_was_made_and_has_a_range(name: str) -> None:
    """No constant refers to another one's origin, and only exact or unused ones have no range."""
    for quantity in _quantities(load(name)):
        assert "see above" not in quantity.origin
        assert quantity.low < quantity.high or quantity.value == 0


def test_all_errors_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    document = _document()
    document["kernels"]["fixed"]["unit"] = "us"
    del document["host"]["launch"]["origin"]
    document["copies"]["fixd"] = dict(document["copies"]["fixed"])
    document["kernels"]["memory_bandwidth"] |= {"value": 0, "low": 0}
    document["phases"]["prepar"] = document["phases"].pop("prepare")
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(HardwareError) as caught:
        load(path)
    for place in (
        "kernels.fixed.unit",
        "host.launch.origin",
        "copies.fixd",
        "kernels.memory_bandwidth.value",
        "phases.prepare: required, but not given",
        "phases.prepar: unknown key, did you mean 'prepare'?",
    ):
        assert place in str(caught.value)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        HardwareError, match=r"no hardware profile 'h20', did you mean 'h200'\? \(available: a100, "
    ):
        load("h20")
    with pytest.raises(HardwareError, match=r"'zzz' \(available: a100, h100, h200, mlx-like\)"):
        load("zzz")


def test_costs_equal_those_computed_by_hand() -> None:
    costs = Costs(load("h200"))
    assert costs.memory(0) == 1500
    assert costs.memory(4_300_000_000) == 1_001_500
    assert costs.copy("h2d", 50_000_000, pinned=True) == 1_001_500
    assert costs.copy("d2h", 8_000_000, pinned=False) == 1_001_500
    assert costs.work(Work(bytes=0, flops=546_000_000_000, unit="gemm"), torch.bfloat16) == 1_001_500
    assert costs.work(Work(bytes=4_300_000_000, flops=1, unit="attention"), torch.float16) == 1_001_500
    assert costs.work(Work(bytes=0, host_bytes=50_000_000), torch.float32) == 1_000_000 + 1500


def test_an_8b_decode_step_is_bound_by_its_weights() -> None:
    """15 GB of weights at 4.3 TB/s take 3.5 ms for any batch up to about 180."""
    costs = Costs(load("h200"))
    weights = 15_000_000_000
    for batch in (1, 64, 128):
        step = costs.work(Work(bytes=weights, flops=weights * batch, unit="gemm"), torch.bfloat16)
        assert step == pytest.approx(3.49e6, rel=0.01)


def test_host_time_of_a_decode_step_is_typical_of_python_schedulers() -> None:
    """At 64 requests, 26 dispatches, a replay, a copy and two waits: within 0.3 to 2 ms."""
    with open_vgpu(load("h200")) as gpu:
        x = torch.zeros(64, dtype=torch.int64, device=gpu.device)
        before = gpu.clock.now()
        for name in (n for n in RANGES if n != "flatten"):
            with gpu.observer.range(name, 0, 64):
                x.add_(1).view(-1).add_(1)
        assert 300_000 < gpu.clock.now() - before < 2_000_000


def _document() -> Any:
    path = Path(__file__).parents[2] / "profiles" / "hardware" / "h200.yaml"
    return yaml.safe_load(path.read_text())
