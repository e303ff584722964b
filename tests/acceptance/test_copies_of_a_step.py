"""Every copy between host and device, and every wait, of one step at #25945: cell by cell what upstream does there.

Requests come from small traces, so that it is known which step prefills, mixes, or sees somebody finish.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from schedbench.profiles.result import CopyRow, Result, SitePart, SyncRow
from tests.acceptance.questions import answer

Ask = Callable[..., Result]


class Copy(NamedTuple):
    """``how``: pinned or pageable, asynchronous (nb) or blocking (B)."""

    function: str
    stream: str
    direction: str
    how: str


Copies = dict[Copy, int]
Waits = Counter[tuple[str, str, str]]
"""By site, stream and call."""

SCHEDULE, FORWARD = "schedule", "forward"

UPLOADS: Copies = {
    # sequence lengths and original ones
    Copy("_upload_lengths", SCHEDULE, "h2d", "pinned nb"): 2,
    # prefix lengths, extend lengths, request rows
    Copy("place_prompts", SCHEDULE, "h2d", "pageable nb"): 3,
    # pointers to the prefixes' slots
    Copy("upload_prefix_pointers", SCHEDULE, "h2d", "pageable B"): 1,
    # temperature, top_p, top_k, min_p, and the seed that keyed sampling adds
    Copy("_pageable", SCHEDULE, "h2d", "pageable B"): 5,
}
PROMPT: Copies = {Copy("resolve_late", FORWARD, "h2d", "pinned nb"): 1}
EXTEND_LENS: Copies = {Copy("_extend_rows", FORWARD, "h2d", "pageable nb"): 2}
RESULT: Copies = {Copy("_hand_on", FORWARD, "d2h", "pinned nb"): 1}
PREFILL = UPLOADS | PROMPT | EXTEND_LENS | RESULT

# A request without a cached prefix, where pages are longer than one token: -1 for its last slot.
LAST_LOC = Copy("last_locations", SCHEDULE, "h2d", "pageable B")
# Rows that stay when somebody finished.
KEEP = Copy("filter_rows", SCHEDULE, "h2d", "pinned nb")
# torch.unique counts on the device and reads how many it found.
FREED_PAGES = Copy("PagedAllocator._release", SCHEDULE, "d2h", "pinned B")
# Upstream penalises the last tokens that the host knows.
LATEST_TOKENS = Copy("known_to_the_host", SCHEDULE, "h2d", "pageable B")
# One penalizer's parameters.
PENALTIES = Copy("upload", SCHEDULE, "h2d", "pageable B")
# The serial loop reads the tokens where they are.
READ = Copy("_host_tokens", SCHEDULE, "d2h", "pageable B")


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Runs a trace of (input_length, output_length, timestamp in ms) on the tiny model."""

    def run(requests: Sequence[tuple[int, int, int]], *overrides: str, **sampling: float) -> Result:
        trace = tmp_path / "trace.jsonl"
        lines = [
            {"input_length": prompt, "output_length": output, "timestamp": at, "sampling": sampling}
            for prompt, output, at in requests
        ]
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        scenario = tmp_path / "steps.yaml"
        scenario.write_text(
            "name: steps\n"
            "model: {preset: tiny-llama}\n"
            "engine: {relay: pr25945, chunked_prefill_size: 256, max_running_requests: 8, kv_tokens: 4096}\n"
            "workload: {trace: trace.jsonl, format: jsonl}\n"
        )
        return answer(scenario, *overrides)

    return run


def copies(result: Result, kind: str) -> Copies:
    """Copies between host and device in all steps of a kind."""
    found: Counter[Copy] = Counter()
    for row in result.copies:
        if row.kind == kind and row.direction in ("h2d", "d2h"):
            how = f"{row.host_memory} {'B' if row.blocking else 'nb'}"
            found[Copy(place(row.site), row.stream, row.direction, how)] += row.count
    return dict(found)


def place(site: SitePart | None) -> str:
    """The function, without what is defined inside it."""
    assert site is not None
    return site.function.partition(".<locals>")[0]


def waits(result: Result, kind: str) -> Waits:
    """Calls whose purpose is to wait, in all steps of a kind."""
    found: Waits = Counter()
    for row in result.syncs:
        if row.kind == kind and row.sync:
            found[place(row.site), row.stream, row.call] += row.count
    return found


def waits_of(copies: Copies) -> Waits:
    """A blocking copy waits for its stream; the overlapped loop reads a result after its event."""
    found: Waits = Counter()
    for copy, count in copies.items():
        if copy.how.endswith("B"):
            found[copy.function, copy.stream, "cudaStreamSynchronize"] += count
        if copy in RESULT:
            found["_host_tokens", FORWARD, "cudaEventSynchronize"] += count
    return found


def times(count: int, copies: Copies) -> Copies:
    return {copy: count * each for copy, each in copies.items()}


def on_one_stream(copies: Copies) -> Copies:
    return {copy._replace(stream=SCHEDULE): count for copy, count in copies.items()}


def steps(result: Result, kind: str) -> int:
    return result.per_step[kind].steps


THREE = [(40, 6, 0)] * 3
STAGGERED = [(40, 4, 0), (40, 7, 0), (40, 10, 0)]


class TestPrefill:
    def test_page_1(self, ask: Ask) -> None:
        result = ask(THREE)
        assert steps(result, "prefill") == 1
        assert copies(result, "prefill") == PREFILL
        assert waits(result, "prefill") == waits_of(PREFILL)

    def test_pages(self, ask: Ask) -> None:
        result = ask(THREE, "engine.page_size=16")
        expected = PREFILL | {LAST_LOC: 3}
        assert copies(result, "prefill") == expected
        assert waits(result, "prefill") == waits_of(expected)

    def test_a_request_with_a_cached_prefix_has_a_last_slot(self, ask: Ask) -> None:
        result = ask([(400, 2, 0)], "engine.page_size=16")
        assert steps(result, "prefill") == 2  # the second chunk continues the first
        assert copies(result, "prefill") == times(2, PREFILL) | {LAST_LOC: 1}

    def test_penalties_upload_their_parameters(self, ask: Ask) -> None:
        result = ask(THREE, frequency_penalty=0.5)
        assert copies(result, "prefill") == PREFILL | {PENALTIES: 1}

    def test_prompt_ids_cross_once_and_on_the_forward_stream(self, ask: Ask) -> None:
        result = ask([(700, 2, 0)])
        prompts = [row for row in result.copies if row.bytes == 700 * 8]
        assert [(row.stream, row.host_memory, row.blocking, row.count) for row in prompts] == [
            (FORWARD, "pinned", False, steps(result, "prefill"))
        ]

    def test_serial(self, ask: Ask) -> None:
        result = ask(THREE, "engine.overlap=false")
        expected = on_one_stream(UPLOADS | PROMPT | EXTEND_LENS) | {READ: 1}
        assert copies(result, "prefill") == expected
        assert waits(result, "prefill") == waits_of(expected)


class TestDecode:
    def test_steady(self, ask: Ask) -> None:
        result = ask(THREE)
        assert copies(result, "decode") == times(steps(result, "decode"), RESULT)
        assert waits(result, "decode") == waits_of(copies(result, "decode"))

    def test_requests_that_finish(self, ask: Ask) -> None:
        """Two leave others behind; after the third there is nobody to keep."""
        result = ask(STAGGERED)
        assert copies(result, "decode") == times(steps(result, "decode"), RESULT) | {KEEP: 2}

    def test_requests_that_finish_with_pages(self, ask: Ask) -> None:
        """Each leaves a page that is not full, which the cache does not take."""
        result = ask(STAGGERED, "engine.page_size=16")
        expected = times(steps(result, "decode"), RESULT) | {KEEP: 2, FREED_PAGES: 3}
        assert copies(result, "decode") == expected
        assert waits(result, "decode") == waits_of(expected)

    def test_penalties(self, ask: Ask) -> None:
        result = ask(THREE, frequency_penalty=0.5)
        decodes = steps(result, "decode")
        expected = times(decodes, RESULT | {LATEST_TOKENS: 1})
        assert copies(result, "decode") == expected
        assert waits(result, "decode") == waits_of(expected)

    def test_exact_penalties_stay_on_the_device(self, ask: Ask) -> None:
        result = ask(THREE, "engine.relay=latest", frequency_penalty=0.5)
        assert copies(result, "decode") == times(steps(result, "decode"), RESULT)

    @pytest.mark.parametrize("penalties", [{}, {"frequency_penalty": 0.5}], ids=["plain", "penalised"])
    def test_serial(self, ask: Ask, penalties: dict[str, float]) -> None:
        result = ask(THREE, "engine.overlap=false", **penalties)
        expected = times(steps(result, "decode"), {READ: 1} | ({LATEST_TOKENS: 1} if penalties else {}))
        assert copies(result, "decode") == expected
        assert waits(result, "decode") == waits_of(expected)


class TestMixed:
    """One request decodes while the prompt of another takes three chunks. Behind the first and the second of
    them the prompt's request leaves the running part, whose rows stay."""

    requests = ((40, 60, 0), (600, 4, 4))
    kept = times(2, {KEEP: 1})

    def test_prefill_and_decode_together(self, ask: Ask) -> None:
        result = ask(self.requests, "engine.mixed_chunk=true")
        assert (steps(result, "prefill"), steps(result, "mixed")) == (1, 3)
        assert copies(result, "mixed") == times(3, PREFILL) | self.kept
        assert waits(result, "mixed") == waits_of(times(3, PREFILL))

    def test_penalties_of_both_parts(self, ask: Ask) -> None:
        result = ask(self.requests, "engine.mixed_chunk=true", frequency_penalty=0.5)
        assert copies(result, "mixed") == times(3, PREFILL | {PENALTIES: 1, LATEST_TOKENS: 1}) | self.kept


@pytest.fixture(scope="module")
def steady() -> Result:
    result = answer("overlap_on", "workload.requests=16", "workload.output_tokens=32")
    assert steps(result, "decode.steady") > 20
    return result


class TestSteadyDecode:
    def test_the_schedule_stream_neither_copies_nor_waits(self, steady: Result) -> None:
        schedule = steady.per_step["decode.steady"].streams[SCHEDULE]
        assert not {"h2d", "d2h", "sync"} & set(schedule)

    def test_the_forward_stream_returns_the_tokens_and_nothing_else(self, steady: Result) -> None:
        forward = steady.per_step["decode.steady"].streams[FORWARD]
        assert (forward["d2h"].median, forward["d2h"].max) == (1, 1)
        assert (forward["d2h_pinned"].median, forward["d2h_pinned"].max) == (1, 1)
        assert not {"h2d", "d2h_blocking", "d2h_pageable"} & set(forward)

    def test_the_host_waits_for_those_tokens_only(self, steady: Result) -> None:
        rows: list[SyncRow | CopyRow] = [*steady.syncs, *(row for row in steady.copies if row.blocking)]
        found = {(place(row.site), row.stream) for row in rows if row.steady}
        assert found == {("_host_tokens", FORWARD)}
