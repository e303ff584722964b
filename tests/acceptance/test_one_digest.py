"""The tokens of ``mixed`` are the same with every engine setting."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.acceptance.runs import SMALL, TIGHT, digest, digest_of, known_digest, result_of, statuses, value

FLOAT32, FLOAT64, NONE = "model.dtype=float32", "model.dtype=float64", "device.values=none"

# The alternatives to the scenario's own setting, which comes first.
AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "loop": ((), ("engine.overlap=false",)),
    "relay": ((), ("engine.relay=latest",)),
    "chunk": (
        (),
        ("engine.chunked_prefill_size=64",),
        ("engine.chunked_prefill_size=64", "engine.mixed_chunk=false"),
        ("engine.mixed_chunk=false",),
        ("engine.chunked_prefill_size=none", "engine.mixed_chunk=false"),
    ),
    "page": ((), ("engine.page_size=16",)),
    "radix": ((), ("engine.radix_cache=false",)),
    "running": ((), ("engine.max_running_requests=2",)),
    "graph": ((), ("engine.cuda_graph=false",)),
    "kv": ((), TIGHT),
    "device": ((), ("device.hardware=mlx-like",)),
}
SINGLE = [setting for settings in AXES.values() for setting in settings[1:]]
COVERING = max(map(len, AXES.values()))
"""So many combinations contain every setting."""


def covering(number: int) -> list[str]:
    """The settings of a combination; each setting is in one of the first ``COVERING`` combinations."""
    chosen = (settings[(number + place) % len(settings)] for place, settings in enumerate(AXES.values()))
    return [override for setting in chosen for override in setting]


def drawn(seed: int) -> list[str]:
    dice = random.Random(seed)
    return [override for settings in AXES.values() for override in dice.choice(settings)]


reference = partial(known_digest, "mixed", *SMALL)


def in_modes(*soon: str) -> list[object]:
    """The given modes in ``make test``, the others in ``make wide``."""
    modes = (FLOAT32, FLOAT64, NONE)
    return [mode if mode in soon else pytest.param(mode, marks=pytest.mark.wide) for mode in modes]


@pytest.mark.wide
@pytest.mark.parametrize("mode", [FLOAT32, FLOAT64, NONE])
@pytest.mark.parametrize("setting", SINGLE, ids=" ".join)
def test_no_single_setting_changes_a_token(mode: str, setting: tuple[str, ...]) -> None:
    assert digest("mixed", *SMALL, mode, *setting) == reference(mode)


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        (NONE, number)
        if mode == NONE or number in (1, 4)
        else pytest.param(mode, number, marks=pytest.mark.wide)
        for mode in (FLOAT32, FLOAT64, NONE)
        for number in range(COVERING)
    ],
)
def test_no_covering_combination_of_settings_changes_a_token(mode: str, number: int) -> None:
    assert digest("mixed", *SMALL, mode, *covering(number)) == reference(mode)


@pytest.mark.wide
@pytest.mark.parametrize("mode", [FLOAT32, FLOAT64, NONE])
@pytest.mark.parametrize("seed", range(5))
def test_no_drawn_combination_of_settings_changes_a_token(mode: str, seed: int) -> None:
    assert digest("mixed", *SMALL, mode, *drawn(seed)) == reference(mode)


@pytest.mark.parametrize("mode", in_modes(NONE))
@pytest.mark.parametrize("loop", ["engine.overlap=true", "engine.overlap=false"])
def test_retraction_changes_no_token(mode: str, loop: str) -> None:
    result = result_of("mixed", *SMALL, *TIGHT, mode, loop)
    assert value(result, "retractions") > 0
    assert digest_of(result) == reference(mode)


def test_tokens_from_tags_differ_from_the_models() -> None:
    assert reference(NONE) != reference(FLOAT32)


@pytest.mark.wide
def test_mixed_has_the_same_tokens_in_both_loops() -> None:
    overlapped = result_of("mixed")
    assert statuses(overlapped) == {"finished"}
    assert len(overlapped.requests) == 64
    assert digest("mixed", "engine.overlap=false", "engine.relay=latest") == digest_of(overlapped)
