"""Disaggregated workers give the tokens of one worker, without lost requests or hazards."""

from __future__ import annotations

from functools import partial

import pytest

from schedbench.profiles.record.result import Abstained
from tests.acceptance.runs import (
    SMALL,
    digest,
    digest_of,
    each_state,
    known_digest,
    result_of,
    statuses,
    value,
)

PAIR = "engine.disaggregation={mode: pair}"
FOUR = "engine.disaggregation={mode: pair, prefill: 2, decode: 2}"
TIGHT = (
    "engine.disaggregation={mode: pair, reserved_decode_tokens: 4}",
    "engine.kv_tokens=880",
)
NONE = "device.values=none"
FEWER = (*SMALL, "workload.requests=10", "workload.output_tokens={dist: uniform, min: 1, max: 30}")

WAYS: dict[str, tuple[str, ...]] = {
    "pair": (PAIR, NONE),
    "serial": (PAIR, "engine.overlap=false"),
    "pages": (PAIR, "engine.page_size=16", NONE),
    "four": (FOUR, NONE),
    "four serial with pages": (FOUR, "engine.overlap=false", "engine.page_size=16", NONE),
    "chunks": (PAIR, "engine.chunked_prefill_size=32", "engine.mixed_chunk=false"),
    "chunks of pages, serial": (
        PAIR,
        "engine.chunked_prefill_size=32",
        "engine.page_size=16",
        "engine.overlap=false",
        NONE,
    ),
    "unchunked": (PAIR, "engine.chunked_prefill_size=none", "engine.mixed_chunk=false", NONE),
    "no cache": (PAIR, "engine.radix_cache=false", NONE),
    "two rows": ("engine.disaggregation={mode: pair, decode: 2}", "engine.max_running_requests=2", NONE),
    "latest": (PAIR, "engine.relay=latest", "engine.page_size=16"),
    "warmed up": (PAIR, "measure.warmup_requests=3", NONE),
    "one at a time": (FOUR, "workload.arrival={process: closed, concurrency: 1}", NONE),
}


reference = partial(known_digest, "mixed", *FEWER)


LATER = ("serial", "chunks", "warmed up", "pages", "four", "unchunked", "no cache")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.wide) if way in LATER else way for way in WAYS]
)
def test_the_tokens_are_those_of_one_worker(way: str) -> None:
    plain = (NONE,) if NONE in WAYS[way] else ()
    result = result_of("mixed", *FEWER, *WAYS[way])
    assert statuses(result) == {"finished"}
    assert digest_of(result) == reference(*plain)


@pytest.mark.parametrize("state", each_state("pr25774-before", "pr25944", "pr26425"))
@pytest.mark.parametrize("overlap", ["true", pytest.param("false", marks=pytest.mark.wide)])
def test_every_state_has_the_tokens_of_one_worker(state: str, overlap: str) -> None:
    ways = (PAIR, NONE, f"engine.relay={state}", f"engine.overlap={overlap}")
    assert digest("mixed", *FEWER, "workload.requests=6", *ways) == reference(NONE, "workload.requests=6")


@pytest.mark.parametrize(
    "way", [(NONE,), ("engine.overlap=false", "engine.page_size=16", NONE), ("engine.relay=latest", NONE)]
)
def test_retraction_to_the_host_changes_no_token(way: tuple[str, ...]) -> None:
    plain = (NONE,) if NONE in way else ()
    result = result_of("mixed", *SMALL, *TIGHT, *way)
    assert value(result, "retractions") > 0
    assert digest_of(result) == digest("mixed", *SMALL, *plain)


@pytest.mark.parametrize("scenario", ["grammar", "penalties"])
def test_sampling_state_is_kept_between_workers(scenario: str) -> None:
    few = ("workload.requests=5", "workload.output_tokens.max=16", "engine.relay=latest")
    assert digest(scenario, *few, PAIR) == digest(scenario, *few)


def test_parts_of_the_time_to_first_token_add_up() -> None:
    result = result_of("mixed", *FEWER, FOUR, NONE)
    parts = ("queue_ms", "prefill_ms", "transfer_ms", "decode_queue_ms")
    assert sum(value(result, name) for name in parts) == pytest.approx(value(result, "ttft_ms"), abs=1e-6)
    assert all(value(result, name) > 0 for name in parts)


def test_every_worker_has_a_part_of_the_result() -> None:
    result = result_of("mixed", *FEWER, FOUR, NONE)
    assert [(rank.name, rank.role) for rank in result.ranks] == [
        ("prefill 0", "prefill"),
        ("prefill 1", "prefill"),
        ("decode 0", "decode"),
        ("decode 1", "decode"),
    ]
    assert [set(rank.per_step) for rank in result.ranks] == [
        *[{"prefill"}] * 2,
        *[{"decode", "decode.steady", "prebuilt"}] * 2,
    ]
    paths = [rank.critical_path for rank in result.ranks]
    assert result.critical_path == {"prefill": paths[0]["prefill"], "decode": paths[2]["decode"]}


@pytest.mark.parametrize("way", [(), ("engine.overlap=false", NONE)])
def test_fake_transfer_abstains_from_tokens(way: tuple[str, ...]) -> None:
    fake = "engine.disaggregation={mode: pair, decode: 2, transfer: fake}"
    result = result_of("mixed", *FEWER, fake, *way)
    assert statuses(result) == {"finished"} and len(result.requests) == 10
    assert result.outputs == Abstained(abstained="KV was never sent, the tokens mean nothing")
    assert not [row for row in result.copies if row.stream == "transfer"]
