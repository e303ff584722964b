"""Shortened keys, as ``compare`` accepts them."""

from __future__ import annotations

import re

import pytest

from schedbench.scenarios.loader import load
from schedbench.scenarios.overrides import expand
from tests.scenarios.refusals import refused


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("overlap", "engine.overlap"),
        ("relay", "engine.relay"),
        ("relay.barrier", "engine.relay.barrier"),
        ("engine.relay", "engine.relay"),
        ("name", "name"),
        ("requests", "workload.requests"),
        ("stages", "engine.pipeline.stages"),
        ("rate", "workload.arrival.rate"),
        ("expect.decode.steady.copy.d2h", "expect.decode.steady.copy.d2h"),
    ],
)
def test_a_key_may_be_shortened_where_it_is_unambiguous(short: str, full: str) -> None:
    assert expand(short) == full


@pytest.mark.parametrize(
    ("short", "message"),
    [
        ("seed", "--set: seed: ambiguous key, expected model.seed or measure.seed"),
        ("overlp", "--set: overlp: unknown key, did you mean 'overlap'?"),
    ],
)
def test_an_ambiguous_key_is_refused(short: str, message: str) -> None:
    assert refused(expand, short) == [message]


def test_set_takes_the_short_keys_that_sides_take() -> None:
    short = load("mixed", ["overlap=false", "requests=3", "barrier=top"])
    full = load("mixed", ["engine.overlap=false", "workload.requests=3", "engine.relay.barrier=top"])
    assert short.expanded() == full.expanded()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["requests=3", "prompt_tokens.max=10"],
            "--set: workload.prompt_tokens.max: 10 contradicts mixed.yaml:19: workload.prompt_tokens.min: "
            "expected at most max, 10, got 16",
        ),
        (
            ["expect.decode.stedy.schedule.sync=0"],
            "--set: expect.decode.stedy: unknown key, did you mean 'decode.steady'?",
        ),
        (
            ["prompt_tokens.min=900"],
            "--set: workload.prompt_tokens.min: expected at most max, 700, got 900",
        ),
    ],
)
def test_an_override_that_contradicts_the_file_is_the_one_to_blame(
    overrides: list[str], message: str
) -> None:
    [problem] = refused(load, "mixed", overrides)
    assert re.sub(r"yaml:\d+", "yaml:19", problem) == message
