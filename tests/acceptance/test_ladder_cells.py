"""The ladder's table: for each state, every copy between host and device, and every wait, of each kind of step.

A row is one copy, a column one state, a number how often a step of the kind makes it. Behind the dot are the states
that only stand between two pull requests.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.acceptance.cells import (
    EXTEND_LENS,
    FORWARD,
    FREED_PAGES,
    KEEP,
    LAST_LOC,
    LATEST_TOKENS,
    PENALTIES,
    READ,
    RESULT,
    SCHEDULE,
    STAGGERED,
    THREE,
    UPLOADS,
    Ask,
    Copies,
    Copy,
    copies,
    on_one_stream,
    steps,
    table_of,
    times,
    waits,
    waits_of,
)

COLUMNS = (
    "pr25774-before", "pr25774", "pr25944", "pr26020", "pr26425", "pr25945-before", "pr25945",
    "pr25944-before", "pr26425-before",
)  # fmt: skip

PROMPT_NOW = Copy("upload_now", SCHEDULE, "h2d", "pinned nb")
PROMPT_LATE = Copy("resolve_late", FORWARD, "h2d", "pinned nb")
# What a decode's slots are allocated by, and what a mixed step's running part gets back.
MIRRORED_LENS = Copy("allocate_by_mirror", SCHEDULE, "h2d", "pageable nb")
RESTORED_LENS = Copy("mix_restoring_lengths", SCHEDULE, "h2d", "pageable nb")
# .item(): torch reads a number through a pinned buffer of its own.
SUMMED_LENS = Copy("_sum_lengths", SCHEDULE, "d2h", "pinned B")

Table = Mapping[Copy, str]


def everywhere(copies: Copies) -> Table:
    return {copy: " ".join([str(count)] * len(COLUMNS)) for copy, count in copies.items()}


def column(table: Table, state: str) -> Copies:
    return table_of(COLUMNS, table, state)


PROMPT: Table = {
    PROMPT_NOW: "1 1 1 1 1 1 0 . 1 1",
    PROMPT_LATE: "0 0 0 0 0 0 1 . 0 0",
}
ALLOCATION: Table = {MIRRORED_LENS: "0 0 1 0 0 0 0 . 0 0"}
RESTORING: Table = {RESTORED_LENS: "0 0 1 0 0 0 0 . 0 0"}
PREFILL = {**everywhere(UPLOADS | EXTEND_LENS | RESULT), **PROMPT}
DECODE = {**everywhere(RESULT), **ALLOCATION}
MIXED = {**PREFILL, **ALLOCATION, **RESTORING}
LEAVING: Table = {
    KEEP: "1 1 1 1 1 1 1 . 1 1",
    SUMMED_LENS: "1 1 0 0 0 0 0 . 0 0",
}
SERIAL_PREFILL = {
    **everywhere(on_one_stream(UPLOADS | EXTEND_LENS) | {READ: 1}),
    PROMPT_NOW: "1 1 1 1 1 1 0 . 1 1",
    PROMPT_LATE._replace(stream=SCHEDULE): "0 0 0 0 0 0 1 . 0 0",
}
SERIAL_DECODE = everywhere({READ: 1})
SERIAL_PENALTIES: Table = {**SERIAL_DECODE, LATEST_TOKENS: "0 0 0 0 0 0 1 . 0 0"}


@pytest.fixture(params=COLUMNS)
def state(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def ask_state(ask: Ask, state: str) -> Ask:
    return lambda requests, *overrides, **sampling: ask(
        requests, f"engine.relay={state}", "engine.cuda_graph=false", *overrides, **sampling
    )


class TestPrefill:
    def test_page_1(self, ask_state: Ask, state: str) -> None:
        result = ask_state(THREE)
        expected = column(PREFILL, state)
        assert steps(result, "prefill") == 1
        assert copies(result, "prefill") == expected
        assert waits(result, "prefill") == waits_of(expected)

    def test_pages(self, ask_state: Ask, state: str) -> None:
        result = ask_state(THREE, "engine.page_size=16")
        expected = column(PREFILL, state) | {LAST_LOC: 3}
        assert copies(result, "prefill") == expected
        assert waits(result, "prefill") == waits_of(expected)

    def test_serial(self, ask_state: Ask, state: str) -> None:
        result = ask_state(THREE, "engine.overlap=false")
        expected = column(SERIAL_PREFILL, state)
        assert copies(result, "prefill") == expected
        assert waits(result, "prefill") == waits_of(expected)


class TestDecode:
    def test_steady(self, ask_state: Ask, state: str) -> None:
        result = ask_state(THREE)
        expected = times(steps(result, "decode"), column(DECODE, state))
        assert copies(result, "decode") == expected
        assert waits(result, "decode") == waits_of(expected)

    def test_requests_that_finish(self, ask_state: Ask, state: str) -> None:
        """Two leave others behind; after the third there is nobody to keep."""
        result = ask_state(STAGGERED)
        decodes = steps(result, "decode")
        expected = times(decodes, column(DECODE, state)) | times(2, column(LEAVING, state))
        assert copies(result, "decode") == expected
        assert waits(result, "decode") == waits_of(expected)

    def test_requests_that_finish_with_pages(self, ask_state: Ask, state: str) -> None:
        result = ask_state(STAGGERED, "engine.page_size=16")
        decodes = steps(result, "decode")
        expected = times(decodes, column(DECODE, state)) | times(2, column(LEAVING, state)) | {FREED_PAGES: 3}
        assert copies(result, "decode") == expected
        assert waits(result, "decode") == waits_of(expected)

    def test_penalties(self, ask_state: Ask, state: str) -> None:
        result = ask_state(THREE, frequency_penalty=0.5)
        expected = times(steps(result, "decode"), column(DECODE, state) | {LATEST_TOKENS: 1})
        assert copies(result, "decode") == expected
        assert waits(result, "decode") == waits_of(expected)

    @pytest.mark.parametrize("penalised", [False, True], ids=["plain", "penalised"])
    def test_serial(self, ask_state: Ask, state: str, penalised: bool) -> None:
        result = ask_state(THREE, "engine.overlap=false", **({"frequency_penalty": 0.5} if penalised else {}))
        cells = SERIAL_PENALTIES if penalised else SERIAL_DECODE
        expected = times(steps(result, "decode"), column(cells, state))
        assert copies(result, "decode") == expected
        assert waits(result, "decode") == waits_of(expected)

    def test_serial_requests_that_finish(self, ask_state: Ask, state: str) -> None:
        result = ask_state(STAGGERED, "engine.overlap=false")
        decodes = steps(result, "decode")
        expected = times(decodes, column(SERIAL_DECODE, state)) | times(2, column(LEAVING, state))
        assert copies(result, "decode") == expected


class TestMixed:
    """One request decodes while the prompt of another takes three chunks. Behind the first and the second of
    them the prompt's request leaves the running part, whose rows stay."""

    requests = ((40, 60, 0), (600, 4, 4))

    def test_prefill_and_decode_together(self, ask_state: Ask, state: str) -> None:
        result = ask_state(self.requests, "engine.mixed_chunk=true")
        assert (steps(result, "prefill"), steps(result, "mixed")) == (1, 3)
        expected = times(3, column(MIXED, state)) | times(2, column(LEAVING, state))
        assert copies(result, "mixed") == expected
        assert waits(result, "mixed") == waits_of(expected)

    def test_penalties_of_both_parts(self, ask_state: Ask, state: str) -> None:
        result = ask_state(self.requests, "engine.mixed_chunk=true", frequency_penalty=0.5)
        penalised = column(MIXED, state) | {PENALTIES: 1, LATEST_TOKENS: 1}
        assert copies(result, "mixed") == times(3, penalised) | times(2, column(LEAVING, state))


# Kernels and device copies of a steady decode. Schedule: the slot's cast and its write to the page table, both
# lengths, then what the row adds. Forward: a graph, positions, staging, sampling, then what the row adds.
KERNELS = {
    # ring numbers, placeholders | in-place resolve; the ring's store is a device copy
    "pr25774-before": (4 + 2, 1, 1),
    "pr25774": (4 + 2, 1, 1),
    # placeholders | in-place resolve, stash
    "pr25944-before": (4 + 1, 2, 0),
    # no length on the schedule stream | gather, compare, all, assert; resolve; add and publish; stash
    "pr25944": (4 - 1 + 1, 4 + 1 + 2 + 1, 0),
    # | in-place resolve, add and dead publish, stash
    "pr26020": (4 + 1, 1 + 2 + 1, 0),
    "pr26425-before": (4 + 1, 1 + 2 + 1, 0),
    "pr26425": (4 + 1, 1 + 2 + 1, 0),
    "pr25945-before": (4 + 1, 1 + 2 + 1, 0),
    # | gather, add and dead publish, stash
    "pr25945": (4, 1 + 2 + 1, 0),
    # one launch | one launch that makes positions too, stash
    "latest": (1, 1 - 1 + 1, 0),
}
SAME_FORWARD = 3 + 2 * 9 + 3  # positions, staging, sampling; two layers; embedding, norm, logits


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_a_steady_decode(ask: Ask, name: str) -> None:
    streams = ask([(40, 20, 0)] * 3, f"engine.relay={name}").per_step["decode.steady"].streams
    schedule, forward, moved = KERNELS[name]
    assert streams[SCHEDULE]["kernel"].median == schedule
    assert streams[FORWARD]["kernel"].median - SAME_FORWARD == forward
    assert (streams[FORWARD]["d2d"].median if "d2d" in streams[FORWARD] else 0) == moved


LATEST_PREFILL: Copies = {
    PROMPT_NOW: 1,
    Copy("_sent", SCHEDULE, "h2d", "pinned nb"): 1,
    **RESULT,
}


class TestLatest:
    """Nothing blocks, and a step's numbers travel together."""

    extend_lens = Copy("_extend_rows", FORWARD, "h2d", "pinned nb")
    penalties = Copy("_send", SCHEDULE, "h2d", "pinned nb")

    @pytest.mark.parametrize("page", [1, 16])
    def test_prefill(self, ask: Ask, page: int) -> None:
        result = ask(THREE, "engine.relay=latest", f"engine.page_size={page}")
        assert copies(result, "prefill") == LATEST_PREFILL
        assert waits(result, "prefill") == waits_of(RESULT)

    @pytest.mark.parametrize("penalised", [False, True], ids=["plain", "penalised"])
    def test_decode(self, ask: Ask, penalised: bool) -> None:
        result = ask(THREE, "engine.relay=latest", **({"frequency_penalty": 0.5} if penalised else {}))
        assert copies(result, "decode") == times(steps(result, "decode"), RESULT)
        assert waits(result, "decode") == waits_of(copies(result, "decode"))

    def test_requests_that_finish(self, ask: Ask) -> None:
        result = ask(STAGGERED, "engine.relay=latest")
        assert copies(result, "decode") == times(steps(result, "decode"), RESULT) | {KEEP: 2}

    def test_mixed(self, ask: Ask) -> None:
        result = ask(TestMixed.requests, "engine.relay=latest", "engine.mixed_chunk=true")
        expected = times(3, LATEST_PREFILL | {self.extend_lens: 1}) | {KEEP: 2}
        assert copies(result, "mixed") == expected
        assert waits(result, "mixed") == waits_of(times(3, RESULT))

    def test_penalties_come_in_one_upload(self, ask: Ask) -> None:
        result = ask(THREE, "engine.relay=latest", frequency_penalty=0.5, presence_penalty=0.5)
        assert copies(result, "prefill") == LATEST_PREFILL | {self.penalties: 1}

    def test_serial(self, ask: Ask) -> None:
        result = ask(THREE, "engine.relay=latest", "engine.overlap=false")
        uploads = {copy: count for copy, count in LATEST_PREFILL.items() if copy not in RESULT}
        assert copies(result, "prefill") == uploads | {READ: 1}
        assert copies(result, "decode") == times(steps(result, "decode"), {READ: 1})
