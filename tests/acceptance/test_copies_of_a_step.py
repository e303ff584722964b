"""Every copy between host and device, and every wait, of one step at #25945: cell by cell what upstream does there.

Requests come from small traces, so that it is known which step prefills, mixes, or sees somebody finish.
"""

from __future__ import annotations

import pytest

from schedbench.profiles.record.result import CopyRow, Result, SyncRow
from tests.acceptance.cells import (
    EXTEND_LENS,
    FORWARD,
    FREED_PAGES,
    KEEP,
    LAST_LOC,
    LATEST_TOKENS,
    PENALTIES,
    PREFILL,
    PROMPT,
    READ,
    RESULT,
    SCHEDULE,
    STAGGERED,
    THREE,
    UPLOADS,
    Ask,
    copies,
    on_one_stream,
    place,
    steps,
    times,
    waits,
    waits_of,
)
from tests.acceptance.runs import result_of


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
    result = result_of("overlap_on", "workload.requests=16", "workload.output_tokens=32")
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
