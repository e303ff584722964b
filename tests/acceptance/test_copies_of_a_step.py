"""Copies and waits of single steps at #25945, besides those that ``test_ladder_cells`` checks for every state."""

from __future__ import annotations

import pytest

from schedbench.profiles.record.result import CopyRow, Result, SyncRow
from tests.acceptance.cells import (
    FORWARD,
    LAST_LOC,
    PREFILL,
    RESULT,
    SCHEDULE,
    THREE,
    Ask,
    copies,
    place,
    steps,
    times,
    waits,
    waits_of,
)
from tests.acceptance.runs import result_of


def test_only_a_first_chunk_uploads_its_missing_last_slot(ask: Ask) -> None:
    result = ask([(400, 2, 0)], "engine.page_size=16")
    assert steps(result, "prefill") == 2  # the second chunk continues the first
    assert copies(result, "prefill") == times(2, PREFILL) | {LAST_LOC: 1}


def test_prompt_ids_are_uploaded_once_on_the_forward_stream(ask: Ask) -> None:
    result = ask([(700, 2, 0)])
    prompts = [row for row in result.copies if row.bytes == 700 * 8]
    assert [(row.stream, row.host_memory, row.blocking, row.count) for row in prompts] == [
        (FORWARD, "pinned", False, steps(result, "prefill"))
    ]


def test_graphs_change_no_copy(ask: Ask) -> None:
    result = ask(THREE)
    assert copies(result, "prefill") == PREFILL
    assert copies(result, "decode") == times(steps(result, "decode"), RESULT)
    for kind in ("prefill", "decode"):
        assert waits(result, kind) == waits_of(copies(result, kind))


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

    def test_the_host_waits_only_for_the_tokens(self, steady: Result) -> None:
        rows: list[SyncRow | CopyRow] = [row for row in steady.syncs if row.sync]
        rows += [row for row in steady.copies if row.blocking]
        found = {(place(row.site), row.stream) for row in rows if row.steady}
        assert found == {("_host_tokens", FORWARD)}
