"""Copies and waits of a step, named as the tables of upstream's behaviour name them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from schedbench.profiles.record.result import Result, SitePart

Ask = Callable[..., Result]
Requests = Sequence[tuple[int, int, int]]
"""Prompt tokens, output tokens and arrival in ms of each request."""


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
    Copy("split_prompts", SCHEDULE, "h2d", "pinned nb"): 2,
    # prefix lengths, extend lengths, request rows
    Copy("split_prompts", SCHEDULE, "h2d", "pageable nb"): 3,
    # pointers to the prefixes' slots
    Copy("upload_prefix_pointers", SCHEDULE, "h2d", "pageable B"): 1,
    # temperature, top_p, top_k, min_p, and the seed that keyed sampling adds
    Copy("_pageable", SCHEDULE, "h2d", "pageable B"): 5,
}
# #25945 moves the prompt's copy from the schedule stream to the forward stream.
PROMPT_NOW = Copy("upload_now", SCHEDULE, "h2d", "pinned nb")
PROMPT_LATE = Copy("resolve_late", FORWARD, "h2d", "pinned nb")
EXTEND_LENS: Copies = {Copy("_extend_rows", FORWARD, "h2d", "pageable nb"): 2}
RESULT: Copies = {Copy("_hand_on", FORWARD, "d2h", "pinned nb"): 1}

# A request without a cached prefix, where pages are longer than one token: -1 for its last slot.
LAST_LOC = Copy("last_locations", SCHEDULE, "h2d", "pageable B")
# Rows that remain when a request finished.
KEEP = Copy("filter_rows", SCHEDULE, "h2d", "pinned nb")
# torch.unique counts on the device and reads how many it found.
FREED_PAGES = Copy("PagedAllocator._release", SCHEDULE, "d2h", "pinned B")
# Upstream penalises the last tokens that have reached the host.
LATEST_TOKENS = Copy("known_to_the_host", SCHEDULE, "h2d", "pageable B")
# One penalizer's parameters.
PENALTIES = Copy("upload", SCHEDULE, "h2d", "pageable B")
# The serial loop reads the tokens where they are.
READ = Copy("_host_tokens", SCHEDULE, "d2h", "pageable B")
# A batch that comes from elsewhere: rows, lengths, original lengths and last tokens; four sampling parameters and the
# seed.
JOINING: Copies = {
    Copy("_upload_rows", SCHEDULE, "h2d", "pageable B"): 4,
    Copy("_pageable", SCHEDULE, "h2d", "pageable B"): 5,
}


def copies(result: Result, kind: str) -> Copies:
    """Copies between host and device in all steps of a kind."""
    found: Counter[Copy] = Counter()
    for row in result.copies:
        if row.kind == kind and row.direction in ("h2d", "d2h"):
            how = f"{row.host_memory} {'B' if row.blocking else 'nb'}"
            found[Copy(place(row.site), row.stream, row.direction, how)] += row.count
    return dict(found)


def place(site: SitePart | None) -> str:
    """The function's name, without those defined inside it."""
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


def has_copies_and_their_waits(result: Result, kind: str, expected: Copies) -> None:
    """All steps of a kind make these copies together, and wait where one of them blocks or a result is read."""
    assert copies(result, kind) == expected
    assert waits(result, kind) == waits_of(expected)


# The ladder's tables: a row is one copy, a column one state. The columns after the dot are states that only stand
# between two pull requests.
COLUMNS = (
    "pr25774-before", "pr25774", "pr25944", "pr26020", "pr26425", "pr25945-before", "pr25945",
    "pr25944-before", "pr26425-before",
)  # fmt: skip
Table = Mapping[Copy, str]
PROMPTS: Table = {
    PROMPT_NOW: "1 1 1 1 1 1 0 . 1 1",
    PROMPT_LATE: "0 0 0 0 0 0 1 . 0 0",
}
# Rows that remain, and the sum of their lengths: .item() reads a number through a pinned buffer of torch's own.
LEAVING: Table = {
    KEEP: "1 1 1 1 1 1 1 . 1 1",
    Copy("_sum_lengths", SCHEDULE, "d2h", "pinned B"): "1 1 0 0 0 0 0 . 0 0",
}


def everywhere(copies: Copies) -> Table:
    return {copy: " ".join([str(count)] * len(COLUMNS)) for copy, count in copies.items()}


def column(table: Table, state: str) -> Copies:
    """Returns one state's column: a row has a number for each column."""
    place = COLUMNS.index(state)
    cells = {copy: int(row.replace(".", " ").split()[place]) for copy, row in table.items()}
    return {copy: count for copy, count in cells.items() if count}


def times(count: int, copies: Copies) -> Copies:
    return {copy: count * each for copy, each in copies.items()}


T = TypeVar("T")


def on_one_stream(copies: Mapping[Copy, T]) -> dict[Copy, T]:
    return {copy._replace(stream=SCHEDULE): count for copy, count in copies.items()}


SERIAL_PREFILL = {
    **everywhere(on_one_stream(UPLOADS | EXTEND_LENS) | {READ: 1}),
    **on_one_stream(PROMPTS),
}


def steps(result: Result, kind: str) -> int:
    return result.per_step[kind].steps


THREE = [(40, 6, 0)] * 3
STAGGERED = [(40, 4, 0), (40, 7, 0), (40, 10, 0)]
