"""SGLang's prefill and decode workers with KV that travels between them, from a clone as in ``test_sglang.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.record.result import Result

from .conftest import findings
from .test_sglang import (
    AFTER,
    BEFORE,
    COUNTED,
    OWN,
    at,
    broken,
    changed,
    given,
    given_wheels,
    median,
    run,
    sources,
)

__all__ = ["broken"]  # a fixture

PAIR = "engine.disaggregation={mode: pair}"
FAKE = "engine.disaggregation={mode: pair, transfer: fake}"
NONE = "device.values=none"


def pair(*overrides: str, hazards: bool = False) -> Result:
    return run(at(AFTER), *overrides, hazards=hazards)


@given
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (NONE, "engine.overlap=false"),
        (NONE, "engine.page_size=16", "engine.chunked_prefill_size=64"),
        (NONE, "engine.kv_tokens=1400"),
        (OWN,),
    ],
    ids=["values", "serial", "pages and chunks", "few KV tokens", "own model runner"],
)
def test_the_tokens_of_a_pair_are_those_of_our_scheduler(overrides: tuple[str, ...]) -> None:
    result = pair(*overrides, PAIR)
    assert result.outputs == run(None, *(given for given in overrides if given != OWN)).outputs
    assert {row.status for row in result.requests} == {"finished"}
    assert result.run.failure is None


# The first of each month from which on SGLang has all classes of transfers that are never made.
RELEASES = ("0.5.9", "0.5.10", "0.5.11", "0.5.13", "0.5.15", "0.5.17", "0.5.19", "0.5.21", "0.5.23")


@given_wheels
@pytest.mark.parametrize("release", RELEASES)
def test_the_tokens_of_a_pair_are_those_of_our_scheduler_in_every_release(release: str) -> None:
    pages = (NONE, "engine.page_size=16", "engine.chunked_prefill_size=64")
    result = run(f"sglang=={release}", *pages, PAIR)
    assert result.outputs == run(None, *pages).outputs
    assert {row.status for row in result.requests} == {"finished"}


@given
def test_every_request_of_four_workers_runs_on_its_own_two() -> None:
    workers = "engine.disaggregation={mode: pair, prefill: 2, decode: 2, transfer: distributed}"
    result = pair(NONE, workers)
    assert result.outputs == run(None, NONE).outputs
    assert [rank.name for rank in result.ranks] == ["prefill 0", "prefill 1", "decode 0", "decode 1"]
    assert [rank.per_step["prebuilt"].steps for rank in result.ranks[2:]] == [4, 4]


@given
def test_steps_count_what_they_do_without_transfers_and_nothing_races() -> None:
    real, fake = pair(PAIR, hazards=True), pair(FAKE)
    for kind in ("prefill", "decode.steady", "prebuilt"):
        for stream in ("schedule", "forward", "copy"):
            for count in (*COUNTED, "kernel"):
                assert median(real, kind, stream, count) == median(fake, kind, stream, count), (kind, count)
    assert {finding.resource for finding in findings(real)} == {"new_seq_lens_buf"}


@given
def test_a_page_that_was_sent_may_be_written_when_the_transfer_has_ended() -> None:
    """The rest of a prompt's last page is free then, and the next prompt gets it."""
    found = findings(pair(PAIR, NONE, "engine.page_size=16", hazards=True))
    assert not [finding for finding in found if "link" in finding.missing]


@given
def test_kv_arrives_no_earlier_than_its_bytes_take_on_the_link() -> None:
    """All prompts have 400 tokens."""
    link, model = load("h200").links["rdma"], ask("mixed").model
    prompts = "workload.prompt_tokens={dist: fixed, value: 400}"
    result = pair("engine.disaggregation={mode: pair, transfer: distributed}", NONE, prompts)
    size = 400 * model.num_layers * 2 * model.kv_size * model.dtype.itemsize
    ns = link.call.value + size * 1e9 / link.bandwidth.value + link.latency.value
    found = result.metrics["transfer_ms"]
    assert found.values[0] * 1e6 >= ns
    assert result.metrics["ttft_ms"].values[0] > found.values[0]


@given
def test_kv_that_is_sent_before_it_is_computed_is_a_hazard(broken: Path) -> None:
    """Before #26380 nothing else orders the two."""
    file = sources(broken, BEFORE).parent / "disaggregation/prefill.py"
    wait = "        if copy_done is not None:\n            copy_done.synchronize()\n"
    changed(file, f"{wait}        if result.routed", "        if result.routed")
    found = findings(run(f"sglang:{broken}", PAIR, NONE, hazards=True))
    assert ("forward", "link") in {(one.first.stream, one.second.stream) for one in found if one.second}


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(at(AFTER), marks=given),
        *(pytest.param(f"sglang=={release}", marks=given_wheels) for release in ("0.5.9", "0.5.13")),
    ],
)
def test_a_client_that_goes_frees_both_workers(engine: str) -> None:
    result = run(engine, PAIR, NONE, "workload.abort={fraction: 0.5, after_tokens: 1}")
    assert sorted(row.status for row in result.requests) == ["aborted"] * 4 + ["finished"] * 4
