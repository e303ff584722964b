"""Draws of a hardware profile's constants, and the effects under them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from schedbench.profiles.judge.draws import Firmness, drawn_profile, draws, firmness, uncertain
from schedbench.profiles.judge.reasons import Reason
from schedbench.profiles.judge.verdict import judge_seeds
from schedbench.profiles.platform.hardware import load
from schedbench.profiles.record.result import Abstained, Result

H200 = load("h200")


def test_every_slice_of_every_range_is_drawn_once() -> None:
    drawn = draws(H200, 8)
    for path, quantity in uncertain(H200).items():
        values = sorted(draw[path] for draw in drawn)
        assert all(quantity.low <= value <= quantity.high for value in values)
        assert values[3] <= quantity.value <= values[4]


def test_draws_repeat_and_differ_by_seed() -> None:
    assert draws(H200, 4, seed=1) == draws(H200, 4, seed=1)
    assert draws(H200, 4, seed=1) != draws(H200, 4, seed=2)


def test_constants_that_no_run_uses_are_not_drawn(result: Callable[..., Result]) -> None:
    speculative = {
        "scenario.expanded.engine.speculative.algorithm": "eagle",
        "scenario.expanded.model.dtype": "float16",
    }
    every, plain, drafting = (
        draws(H200, 4),
        draws(H200, 4, runs=[result()]),
        draws(H200, 4, runs=[result(speculative)]),
    )
    assert all(draw.items() < whole.items() for draw, whole in zip(plain, every, strict=True))
    unused = every[0].keys() - plain[0].keys()
    assert {"phases.draft_extend.b", "links.rdma.call", "kernels.gemm_rates.float16"} <= unused
    assert not any(path.startswith(("host.", "copies.", "phases.settle")) for path in unused)
    assert unused - drafting[0].keys() < unused
    assert "phases.draft_extend.b" in drafting[0] and "kernels.gemm_rates.float16" in drafting[0]
    assert (
        draws(H200, 4, runs=[result(), result(speculative)])[0].keys() == plain[0].keys() | drafting[0].keys()
    )


def test_a_draw_is_a_profile_without_ranges(tmp_path: Path) -> None:
    [draw, *_] = draws(H200, 2)
    path = tmp_path / "draw.yaml"
    path.write_text(drawn_profile(H200, draw).as_file())
    drawn = load(path)
    assert drawn.host.launch.value == draw["host.launch"] != H200.host.launch.value
    assert uncertain(drawn) == {} and draws(drawn) == []
    assert drawn.name == "h200" and drawn.available == H200.available


@pytest.mark.parametrize("path", ["host.launch", "phases.settle.b", "links.nvlink.latency"])
def test_the_constant_that_an_effect_depends_on_is_named(path: str) -> None:
    """The effect changes its sign with this constant alone; a hundred others do not matter."""
    drawn, middle = draws(H200, 16), uncertain(H200)[path].value
    found = firmness(1.0, [draw[path] - middle for draw in drawn], drawn)
    assert isinstance(found, Firmness)
    assert found.flips and found.constant == path and found.correlation == pytest.approx(1.0)
    assert found.holding == 8 and found.draws == 16


def test_an_effect_of_one_sign_holds() -> None:
    drawn = draws(H200, 4)
    found = firmness(-2.0, [-1.0, -2.0, -3.0, -0.5], drawn)
    assert isinstance(found, Firmness)
    assert not found.flips and found.holding == 4 and (found.low, found.high) == (-3.0, -0.5)


def test_an_effect_whose_sign_holds_in_no_draw_is_doubted() -> None:
    judged = judge_seeds([1.0] * 5, [1.03] * 5, "higher")
    assert judged.verdict == "better"
    assert judged.drawn(firmness(3.0, [-4.0, -1.0], draws(H200, 2))).reasons == (Reason.CONSTANTS,)


def test_an_effect_that_no_constant_changes_names_none() -> None:
    found = firmness(0.0, [0.0, 0.0], draws(H200, 2))
    assert isinstance(found, Firmness)
    assert (found.constant, found.correlation, found.holding, found.flips) == ("", 0.0, 2, False)


def test_an_effect_relative_to_zero_abstains_without_a_verdict() -> None:
    """``percent`` is infinite where A is 0 and B is not."""
    found = firmness(-2.0, [-1.0, math.inf], draws(H200, 2))
    assert found == Abstained(abstained="A is 0 in 1 of 2 draws: an effect in percent is undefined there")
    judged = judge_seeds([100.0] * 5, [98.0] * 5, "higher").drawn(found)
    assert judged.verdict == "inconclusive" and judged.reasons == (Reason.CONSTANTS,)


def test_an_effect_that_is_itself_undefined_abstains() -> None:
    found = firmness(math.inf, [1.0, 1.0], draws(H200, 2))
    assert found == Abstained(abstained="A is 0 without draws: an effect in percent is undefined there")
