"""The tokens of ``mixed`` are the same with every engine setting."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
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


def combinations() -> Iterator[object]:
    """Every setting alone, combinations that contain every setting, and drawn ones, in every mode; some in ``make
    test``."""
    for mode in (NONE, FLOAT32, FLOAT64):
        for number, settings in enumerate((*map(covering, range(COVERING)), *SINGLE, *map(drawn, range(5)))):
            soon = number < COVERING and (mode == NONE or number in (1, 4))
            yield pytest.param(mode, settings, marks=() if soon else pytest.mark.wide)


@pytest.mark.parametrize(("mode", "settings"), [*combinations()], ids=str)
def test_no_combination_of_settings_changes_a_token(mode: str, settings: Sequence[str]) -> None:
    assert digest("mixed", *SMALL, mode, *settings) == reference(mode)


@pytest.mark.parametrize(
    "mode", [NONE, *(pytest.param(mode, marks=pytest.mark.wide) for mode in (FLOAT32, FLOAT64))]
)
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
