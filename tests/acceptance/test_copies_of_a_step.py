"""Copies and waits of single steps at #25945, besides those that ``test_ladder_cells`` checks for every state."""

from __future__ import annotations

from tests.acceptance.cells import (
    FORWARD,
    LAST_LOC,
    PREFILL,
    RESULT,
    THREE,
    Ask,
    copies,
    steps,
    times,
    waits,
    waits_of,
)


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
