"""Disaggregated workers: every copy and wait of a prebuilt batch, by state, and of page allocation and transfers. As in
upstream's table, prompts that no kernel reads, rows, two lengths and last tokens are blocking uploads, and so are the
sampling parameters."""

from __future__ import annotations

from collections import Counter

import pytest

from schedbench.profiles.record.result import Result
from tests.acceptance.cells import (
    JOINING,
    SCHEDULE,
    THREE,
    Ask,
    Copies,
    Copy,
    has_copies_and_their_waits,
    place,
    steps,
    times,
)
from tests.acceptance.runs import each_state

PAIR = "engine.disaggregation={mode: pair}"
PREBUILT: Copies = {
    Copy("_upload_prompts", SCHEDULE, "h2d", "pageable B"): 1,
    **JOINING,
}
LATEST: Copies = {Copy("_send", SCHEDULE, "h2d", "pinned nb"): 2}
# Kernels: a sum and two stores where lengths are published and tokens stashed, one store where tokens are.
KERNELS = {"pr25944": 3, "pr25945": 1, "latest": 1}


@pytest.mark.parametrize("overlap", ["true", pytest.param("false", marks=pytest.mark.wide)])
@pytest.mark.parametrize("state", each_state("pr25774-before", "pr25944", "pr26425", "pr25945", "latest"))
def test_copies_of_a_prebuilt_batch(ask: Ask, state: str, overlap: str) -> None:
    result = ask(THREE, PAIR, f"engine.relay={state}", f"engine.overlap={overlap}")
    wanted = times(steps(result, "prebuilt"), LATEST if state == "latest" else PREBUILT)
    has_copies_and_their_waits(result, "prebuilt", wanted)


@pytest.mark.parametrize("state", each_state("pr25774", "pr26020", *KERNELS))
def test_kernels_of_a_prebuilt_batch(ask: Ask, state: str) -> None:
    result = ask([(40, 6, 0)], PAIR, f"engine.relay={state}")
    kernels = result.per_step["prebuilt"].streams[SCHEDULE].get("kernel")
    assert (kernels.max if kernels else 0) == KERNELS.get(state, 0)


def everywhere(result: Result, function: str) -> Counter[tuple[str, bool, str]]:
    """Copies to and from the host by ``function``, in all steps: direction, blocking, memory."""
    found: Counter[tuple[str, bool, str]] = Counter()
    for row in result.copies:
        if row.site is not None and place(row.site) == function and row.direction != "d2d":
            found[row.direction, row.blocking, row.host_memory] += row.count
    return found


@pytest.mark.parametrize("page", [1, 16])
def test_allocation_costs_a_blocking_copy_and_three_uploads_with_pages(ask: Ask, page: int) -> None:
    result = ask(THREE, PAIR, f"engine.page_size={page}")
    chunks = 3
    assert everywhere(result, "DisaggComponents.page_list") == {("d2h", True, "pageable"): 3 + chunks}
    lengths = everywhere(result, "_allocate_slots") + everywhere(result, "last_locations")
    admitted, prefilled = 3 * 3, 3
    assert lengths == ({("h2d", True, "pageable"): admitted + prefilled} if page > 1 else {})


def test_every_chunk_downloads_its_page_list(ask: Ask) -> None:
    result = ask([(600, 4, 0)], PAIR)  # in chunks of 256
    assert everywhere(result, "DisaggComponents.page_list") == {("d2h", True, "pageable"): 1 + 3}
