"""The table of a decode with KV on the host: every copy between host and device, and every wait, for each state. There
are three requests whose prompts are prefilled and staged together and which end together; the first decode has nothing
to back up."""

from __future__ import annotations

import pytest

from schedbench.profiles.record.result import Result
from schedbench.sched.relay.states import states
from tests.acceptance.cells import (
    FORWARD,
    FREED_PAGES,
    JOINING,
    READ,
    RESULT,
    SCHEDULE,
    Ask,
    Copies,
    Copy,
    copies,
    has_copies_and_their_waits,
    steps,
    times,
)

wide = pytest.mark.wide

HOSTED = (
    "model.preset=tiny-sparse",
    "engine.radix_cache=false",
    "engine.hisparse={enabled: true, device_buffer_size: 48}",
    "engine.cuda_graph=false",
)
OUTPUTS = 12
TOGETHER = [(40, OUTPUTS, 0)] * 3
STATES = [name for name in states() if name != "latest"]
BEFORE_26425 = STATES[: STATES.index("pr26425")]

# The copy that #26425 removed, and the one that remains.
ROWS = Copy("indices_downloaded", SCHEDULE, "d2h", "pageable B")
NAMES = Copy("upload_indices", SCHEDULE, "h2d", "pageable B")
# A request's next page on the host.
HOST_PAGE = Copy("Coordinator._set_host_slots", SCHEDULE, "h2d", "pageable nb")
# Between #25944 and #26020 lengths on the device are sentinels. The second upload is ours: upstream used the sentinel.
SENTINELS = {
    Copy("allocate_by_mirror", SCHEDULE, "h2d", "pageable nb"): 1,
    Copy("lengths_from_mirror", SCHEDULE, "h2d", "pageable nb"): 1,
}


def expected(decodes: int, state: str) -> Copies:
    """The copies of all decodes, with pages of one token."""
    every = RESULT | ({ROWS: 1} if state in BEFORE_26425 else {}) | (SENTINELS if state == "pr25944" else {})
    return times(decodes, every) | JOINING | {NAMES: decodes - 1, HOST_PAGE: 3 * (decodes - 1)}


@pytest.mark.parametrize("state", STATES)
def test_copies_of_a_decode(ask: Ask, state: str) -> None:
    result = ask(TOGETHER, *HOSTED, f"engine.relay={state}")
    has_copies_and_their_waits(result, "decode", expected(steps(result, "decode"), state))


@wide
@pytest.mark.parametrize("state", STATES)
def test_copies_of_a_serial_decode(ask: Ask, state: str) -> None:
    """On one stream there are no sentinel lengths, and the tokens are read where they are."""
    result = ask(TOGETHER, *HOSTED, f"engine.relay={state}", "engine.overlap=false")
    decodes = steps(result, "decode")
    found = {
        copy: count
        for copy, count in expected(decodes, state).items()
        if copy not in RESULT and copy not in SENTINELS
    }
    assert copies(result, "decode") == found | {READ: decodes}


@wide
@pytest.mark.parametrize("state", ["pr26425-before", "pr26425"])
def test_with_pages_only_a_newly_opened_page_is_uploaded(ask: Ask, state: str) -> None:
    """Each request backs up position 48. A request that ends frees the pages of its buffer and those of its row, each
    with a count that is read back."""
    result = ask(TOGETHER, *HOSTED, f"engine.relay={state}", "engine.page_size=16")
    found = expected(steps(result, "decode"), state) | {HOST_PAGE: 3, FREED_PAGES: 3 + 1}
    has_copies_and_their_waits(result, "decode", found)


@wide
def test_26425_changes_no_prefill(ask: Ask) -> None:
    before, after = (
        ask(TOGETHER, *HOSTED, f"engine.relay={state}") for state in ("pr26425-before", "pr26425")
    )
    assert steps(after, "decode") == steps(before, "decode")
    assert copies(after, "prefill") == copies(before, "prefill")


@wide
@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("blocking", NAMES),
        ("pinned", Copy("_send", SCHEDULE, "h2d", "pinned nb")),
        ("none", None),
    ],
)
def test_a_switch_removes_the_copy_that_26425_left(ask: Ask, how: str, named: Copy | None) -> None:
    result = ask(TOGETHER, *HOSTED, f"engine.relay={{state: pr25945, backup_indices: {how}}}")
    decodes = steps(result, "decode")
    found = {copy: count for copy, count in expected(decodes, "pr25945").items() if copy != NAMES}
    assert copies(result, "decode") == found | ({named: decodes - 1} if named else {})


def test_latest_makes_no_blocking_copy(ask: Ask) -> None:
    """A returning batch is one upload, and its sampling parameters another."""
    result = ask(TOGETHER, *HOSTED, "engine.relay=latest")
    decodes = steps(result, "decode")
    packed = {Copy("_send", SCHEDULE, "h2d", "pinned nb"): 2, HOST_PAGE: 3 * (decodes - 1)}
    has_copies_and_their_waits(result, "decode", times(decodes, RESULT) | packed)


def kernel_copies(result: Result) -> dict[tuple[str, str], tuple[int, int]]:
    """(kind of step, stream) → (how many, bytes) of kernels that touch the host's memory."""
    rows = [row for row in result.copies if row.direction == "kernel"]
    assert all(row.host_memory == "pinned" and not row.blocking for row in rows)
    return {(row.kind, row.stream): (row.count, row.bytes) for row in rows}


TOKEN = 2 * 2 * 32 * 4  # bytes of keys and values, two heads of 32 floats, in one layer
LAYERS = 2


@pytest.mark.parametrize("graph", ["true", "false"])
def test_kv_is_moved_by_kernels_that_declare_their_bytes(ask: Ask, graph: str) -> None:
    result = ask(TOGETHER, *HOSTED, f"engine.cuda_graph={graph}", "engine.relay=pr26425")
    found, decodes = kernel_copies(result), steps(result, "decode")
    assert found["prefill", "staging"] == (3, 3 * 40 * TOKEN * LAYERS)
    assert found["decode", "backup"] == (decodes - 1, 3 * (decodes - 1) * TOKEN * LAYERS)
    fetched = result.metrics["hisparse_swap_in_bytes_per_step"].values[0] * decodes
    assert found["decode", FORWARD][1] == pytest.approx(fetched)
    assert fetched > 0
    assert set(found) == {("prefill", "staging"), ("decode", "backup"), ("decode", FORWARD)}
