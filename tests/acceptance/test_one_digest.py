"""One question has one answer, whatever the scheduler does on the way: the tokens of ``mixed`` across engines."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.acceptance.runs import SMALL, digest, digest_of, result_of, statuses, value

MODES = ("model.dtype=float32", "model.dtype=float64", "device.values=none")
TIGHT = ("engine.kv_tokens=1920", "engine.schedule_conservativeness=0.01")

# What may stand instead of the scenario's own setting, which is the one left out.
AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "loop": (("engine.overlap=false",),),
    "relay": (("engine.relay=latest",),),
    "chunk": (
        ("engine.chunked_prefill_size=64",),
        ("engine.chunked_prefill_size=64", "engine.mixed_chunk=false"),
        ("engine.mixed_chunk=false",),
        ("engine.chunked_prefill_size=none", "engine.mixed_chunk=false"),
    ),
    "page": (("engine.page_size=16",),),
    "radix": (("engine.radix_cache=false",),),
    "running": (("engine.max_running_requests=2",),),
    "graph": (("engine.cuda_graph=false",),),
    "kv": (TIGHT,),
    "device": (("device.hardware=mlx-like",),),
}
SINGLE = [option for options in AXES.values() for option in options]


def drawn(seed: int) -> list[str]:
    """One setting of every axis, its own included."""
    dice = random.Random(seed)
    return [override for options in AXES.values() for override in dice.choice([(), *options])]


@cache
def reference(mode: str) -> str:
    return digest("mixed", *SMALL, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", SINGLE, ids=" ".join)
def test_no_single_knob_changes_a_token(mode: str, option: tuple[str, ...]) -> None:
    assert digest("mixed", *SMALL, mode, *option) == reference(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_no_combination_of_knobs_changes_a_token(mode: str, seed: int) -> None:
    assert digest("mixed", *SMALL, mode, *drawn(seed)) == reference(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", ["engine.overlap=true", "engine.overlap=false"])
def test_retracted_requests_come_back_with_the_same_tokens(mode: str, loop: str) -> None:
    result = result_of("mixed", *SMALL, *TIGHT, mode, loop)
    assert value(result, "retractions") > 0
    assert digest_of(result) == reference(mode)


def test_hashes_are_other_tokens_than_the_models() -> None:
    assert reference("device.values=none") != reference("model.dtype=float32")


@pytest.mark.wide
def test_the_whole_of_mixed_has_the_same_tokens_in_both_loops() -> None:
    overlapped = result_of("mixed")
    assert statuses(overlapped) == {"finished"}
    assert len(overlapped.requests) == 64
    assert digest("mixed", "engine.overlap=false", "engine.relay=latest") == digest_of(overlapped)
