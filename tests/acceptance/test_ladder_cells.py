"""The ladder's table: for each state, every copy between host and device, and every wait, of each kind of step. A
number is how often a step of the kind makes the copy."""

from __future__ import annotations

import pytest

from schedbench.profiles.record.result import Result
from tests.acceptance.cells import (
    EXTEND_LENS,
    FORWARD,
    FREED_PAGES,
    KEEP,
    LAST_LOC,
    LATEST_TOKENS,
    LEAVING,
    PENALTIES,
    PROMPT_NOW,
    PROMPTS,
    READ,
    RESULT,
    SCHEDULE,
    SERIAL_PREFILL,
    STAGGERED,
    THREE,
    UPLOADS,
    Ask,
    Copies,
    Copy,
    Requests,
    Table,
    column,
    copies,
    everywhere,
    has_copies_and_their_waits,
    steps,
    times,
)

# What a decode's slots are allocated by, and what a mixed step's running part gets back.
MIRRORED_LENS = Copy("allocate_by_mirror", SCHEDULE, "h2d", "pageable nb")
RESTORED_LENS = Copy("mix_restoring_lengths", SCHEDULE, "h2d", "pageable nb")
ALLOCATION: Table = {MIRRORED_LENS: "0 0 1 0 0 0 0 . 0 0"}
RESTORING: Table = {RESTORED_LENS: "0 0 1 0 0 0 0 . 0 0"}
PREFILL = {**everywhere(UPLOADS | EXTEND_LENS | RESULT), **PROMPTS}
DECODE = {**everywhere(RESULT), **ALLOCATION}
MIXED = {**PREFILL, **ALLOCATION, **RESTORING}
SERIAL_DECODE = everywhere({READ: 1})
SERIAL_PENALTIES: Table = {**SERIAL_DECODE, LATEST_TOKENS: "0 0 0 0 0 0 1 . 0 0"}


def run(ask: Ask, state: str, requests: Requests, *overrides: str, **sampling: float) -> Result:
    """Runs a small trace; copies do not depend on values."""
    fixed = (f"engine.relay={state}", "engine.cuda_graph=false", "device.values=none")
    return ask(requests, *fixed, *overrides, **sampling)


@pytest.mark.parametrize(
    ("page", "looked_up", "freed"),
    [(1, {}, {}), (16, {LAST_LOC: 3}, {FREED_PAGES: 3})],
    ids=["tokens", "pages"],
)
def test_prefill_and_decode(ask: Ask, state: str, page: int, looked_up: Copies, freed: Copies) -> None:
    """Two of three requests finish before the others; after the third no row is kept. With pages, each leaves a partly
    filled one, which the cache does not take."""
    result = run(ask, state, STAGGERED, f"engine.page_size={page}")
    assert steps(result, "prefill") == 1
    has_copies_and_their_waits(result, "prefill", column(PREFILL, state) | looked_up)
    decodes = times(steps(result, "decode"), column(DECODE, state))
    has_copies_and_their_waits(result, "decode", decodes | times(2, column(LEAVING, state)) | freed)


def test_penalties(ask: Ask, state: str) -> None:
    result = run(ask, state, THREE, frequency_penalty=0.5)
    assert copies(result, "prefill") == column(PREFILL, state) | {PENALTIES: 1}
    penalised = column(DECODE, state) | {LATEST_TOKENS: 1}
    has_copies_and_their_waits(result, "decode", times(steps(result, "decode"), penalised))


def test_serial(ask: Ask, state: str) -> None:
    result = run(ask, state, STAGGERED, "engine.overlap=false")
    has_copies_and_their_waits(result, "prefill", column(SERIAL_PREFILL, state))
    decodes = times(steps(result, "decode"), column(SERIAL_DECODE, state))
    has_copies_and_their_waits(result, "decode", decodes | times(2, column(LEAVING, state)))


def test_serial_penalties(ask: Ask, state: str) -> None:
    result = run(ask, state, THREE, "engine.overlap=false", frequency_penalty=0.5)
    expected = times(steps(result, "decode"), column(SERIAL_PENALTIES, state))
    has_copies_and_their_waits(result, "decode", expected)


# One request decodes while the prompt of another takes three chunks. After the first and the second of them the
# prompt's request leaves the running part, whose rows stay.
CHUNKED_BESIDE_A_DECODE = ((40, 20, 0), (600, 4, 1))


def test_mixed(ask: Ask, state: str) -> None:
    result = run(ask, state, CHUNKED_BESIDE_A_DECODE, "engine.mixed_chunk=true")
    assert (steps(result, "prefill"), steps(result, "mixed")) == (1, 3)
    expected = times(3, column(MIXED, state)) | times(2, column(LEAVING, state))
    has_copies_and_their_waits(result, "mixed", expected)


def test_mixed_penalties(ask: Ask, state: str) -> None:
    result = run(ask, state, CHUNKED_BESIDE_A_DECODE, "engine.mixed_chunk=true", frequency_penalty=0.5)
    penalised = column(MIXED, state) | {PENALTIES: 1, LATEST_TOKENS: 1}
    assert copies(result, "mixed") == times(3, penalised) | times(2, column(LEAVING, state))


# Kernels of a steady decode and the forward's device copies. Schedule: the slot's cast and its write to the page
# table, both lengths, then what the row adds. Forward: a graph, positions, staging, sampling, then what the row adds.
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
    streams = (
        ask([(40, 20, 0)] * 3, f"engine.relay={name}", "device.values=none").per_step["decode.steady"].streams
    )
    schedule, forward, moved = KERNELS[name]
    assert streams[SCHEDULE]["kernel"].median == schedule
    assert streams[FORWARD]["kernel"].median - SAME_FORWARD == forward
    assert (streams[FORWARD]["d2d"].median if "d2d" in streams[FORWARD] else 0) == moved
    # The lengths that index the page table, which one launch writes in ``latest``.
    assert ("d2d" in streams[SCHEDULE]) == (name != "latest")


LATEST = ("engine.relay=latest", "device.values=none")
LATEST_PREFILL: Copies = {
    PROMPT_NOW: 1,
    Copy("_upload_fused", SCHEDULE, "h2d", "pinned nb"): 1,
    **RESULT,
}


class TestLatest:
    """No copy blocks, and the numbers of a step are uploaded together."""

    extend_lens = Copy("_extend_rows", FORWARD, "h2d", "pinned nb")
    penalties = Copy("_send", SCHEDULE, "h2d", "pinned nb")

    @pytest.mark.parametrize("page", [1, 16])
    def test_prefill(self, ask: Ask, page: int) -> None:
        result = ask(THREE, *LATEST, f"engine.page_size={page}")
        has_copies_and_their_waits(result, "prefill", LATEST_PREFILL)

    @pytest.mark.parametrize("penalised", [False, True], ids=["plain", "penalised"])
    def test_decode(self, ask: Ask, penalised: bool) -> None:
        result = ask(THREE, *LATEST, **({"frequency_penalty": 0.5} if penalised else {}))
        has_copies_and_their_waits(result, "decode", times(steps(result, "decode"), RESULT))

    def test_finished_requests(self, ask: Ask) -> None:
        result = ask(STAGGERED, *LATEST)
        assert copies(result, "decode") == times(steps(result, "decode"), RESULT) | {KEEP: 2}

    def test_mixed(self, ask: Ask) -> None:
        result = ask(CHUNKED_BESIDE_A_DECODE, *LATEST, "engine.mixed_chunk=true")
        expected = times(3, LATEST_PREFILL | {self.extend_lens: 1}) | {KEEP: 2}
        has_copies_and_their_waits(result, "mixed", expected)

    def test_penalties_come_in_one_upload(self, ask: Ask) -> None:
        result = ask(THREE, *LATEST, frequency_penalty=0.5, presence_penalty=0.5)
        assert copies(result, "prefill") == LATEST_PREFILL | {self.penalties: 1}

    def test_serial(self, ask: Ask) -> None:
        result = ask(THREE, *LATEST, "engine.overlap=false")
        uploads = {copy: count for copy, count in LATEST_PREFILL.items() if copy not in RESULT}
        assert copies(result, "prefill") == uploads | {READ: 1}
        assert copies(result, "decode") == times(steps(result, "decode"), {READ: 1})


# ---- at #25945, whose runs have graphs and real values ------------------------------------------------------


def test_only_a_first_chunk_uploads_its_missing_last_slot(ask: Ask) -> None:
    result = ask([(400, 2, 0)], "engine.page_size=16")
    assert steps(result, "prefill") == 2  # the second chunk continues the first
    assert copies(result, "prefill") == times(2, column(PREFILL, "pr25945")) | {LAST_LOC: 1}


def test_prompt_ids_are_uploaded_once_on_the_forward_stream(ask: Ask) -> None:
    result = ask([(700, 2, 0)])
    prompts = [row for row in result.copies if row.bytes == 700 * 8]
    assert [(row.stream, row.host_memory, row.blocking, row.count) for row in prompts] == [
        (FORWARD, "pinned", False, steps(result, "prefill"))
    ]


def test_graphs_change_no_copy(ask: Ask) -> None:
    result = ask(THREE)
    has_copies_and_their_waits(result, "prefill", column(PREFILL, "pr25945"))
    has_copies_and_their_waits(result, "decode", times(steps(result, "decode"), RESULT))
