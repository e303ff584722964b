"""What it saves to decode without downloading rows, and when another copy hides the saving. Both blocking copies of a
decode follow each other on the schedule stream, so the first of them waits. Behind a barrier that wait is for the
forward, and the host's remaining work comes too late for the next one."""

from __future__ import annotations

import pytest

from schedbench.profiles.record.result import Result
from tests.acceptance.runs import known_result, value

BIG = (
    "model={preset: sparse-14b, dtype: bfloat16}",
    "device.values=none",
    "engine.hisparse={enabled: true}",
    "engine.page_size=64",
    "engine.kv_tokens=32768",
    "engine.max_running_requests=4",
    "engine.chunked_prefill_size=8192",
    "workload.requests=3",
    "workload.arrival=burst",
    "workload.prompt_tokens=4500",
    "workload.output_tokens=16",
    "measure.warmup_requests=0",
)
ROWS, NAMES = "indices_downloaded", "upload_indices"


def run(state: str, barrier: str, named: str) -> Result:
    relay = f"engine.relay={{state: {state}, barrier: {barrier}, backup_indices: {named}}}"
    return known_result("hisparse", *BIG, relay)


def waits(result: Result) -> dict[str, tuple[float, float]]:
    """Returns (host time, exposed part) in us per decode of the two blocking copies."""
    decodes = result.per_step["decode"].steps
    found: dict[str, tuple[float, float]] = {}
    for row in (*result.copies, *result.syncs):
        if row.kind == "decode" and row.site is not None and row.site.function in (ROWS, NAMES):
            host, exposed = found.get(row.site.function, (0.0, 0.0))
            found[row.site.function] = host + row.host_us / decodes, exposed + row.exposed_us / decodes
    return found


def stall(state: str, barrier: str, named: str) -> float:
    """Returns the exposed time of the two copies, us per decode."""
    return sum(exposed for _, exposed in waits(run(state, barrier, named)).values())


@pytest.mark.parametrize("state", ["pr26425-before", "pr26425"])
@pytest.mark.parametrize("named", ["blocking", "none"])
def test_without_a_barrier_no_stall_is_exposed(state: str, named: str) -> None:
    assert stall(state, "off", named) < 1


def test_behind_a_barrier_the_first_copy_waits_for_the_forward() -> None:
    before, after = waits(run("pr26425-before", "top", "blocking")), waits(run("pr26425", "top", "blocking"))
    forward_us = 5_000
    assert before[ROWS][0] > forward_us > 100 > before[NAMES][0]
    assert after.keys() == {NAMES} and after[NAMES][0] > forward_us


def test_the_remaining_copy_hides_the_removed_one() -> None:
    before, after = stall("pr26425-before", "top", "blocking"), stall("pr26425", "top", "blocking")
    assert before > 5 and after > 0.8 * before


def test_without_both_copies_the_stall_is_gone() -> None:
    before, after = stall("pr26425-before", "top", "none"), stall("pr26425", "top", "none")
    assert before > 5 and after == 0


def test_the_inter_token_latency_shows_the_saving() -> None:
    def itl(state: str, named: str) -> float:
        return value(run(state, "top", named), "itl_ms")

    shown = itl("pr26425-before", "none") - itl("pr26425", "none")
    hidden = itl("pr26425-before", "blocking") - itl("pr26425", "blocking")
    assert shown > 3 * hidden > 0
