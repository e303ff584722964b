"""The ladder: every state with its pull request, its switches, the expected effects and its known races."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import rows
from .names import STATE_NAMES
from .row import DraftRow, RelayRow

# Races and defects of the states, as results declare them.
NEGATIVE_IDS = "negative ids: a prompt's id below zero is taken for a placeholder and replaced"
ONE_SIDED_MERGE = "one-sided merge: a side without token ids fails, or loses the other side's"
STAGED_LATE = "mixed steps: mix_running_indices is freed before the forward stream has gathered with it"
SLOT_REUSE = "slot reuse: a row or KV slot freed while a forward reads it is written by its next owner"
PAGE_TABLE_REWRITE = (
    "page-table rewrite: settling replaces a row's slots by the cache's while a forward reads the row"
)
PENALTY_STATE = "penalty state: the schedule counts tokens into what a forward reads its penalties from"
DRAFT_LENGTHS = (
    "draft lengths: the schedule filters lengths that a speculative forward gathers on its own stream"
)
CHUNK_REWRITE = (
    "chunk rewrite: a prompt's next chunk rewrites its row while another stage's batch still reads it"
)
ROUND_TRIP = (
    "round trip: tokens that came round are freed by the schedule before its own reads of them have run"
)
SPLIT_TOKENS = (
    "split prompts: tokens that the forward stream sampled are freed before the schedule has read them"
)
DEAD_STASH = "dead stash: every step stores tokens that only mixed steps read"
DEAD_PUBLISH = "dead publish: every step publishes lengths that are never read"


@dataclass(frozen=True, slots=True)
class State:
    """One state of the ladder. ``expect`` is the expected change against ``before``; ``refuses`` gives the reason why a
    switch's value has no working form here; ``staged`` makes a pipeline stage's row of the serial one,
    and ``staged_hazards`` are races that the row has there."""

    name: str
    pr: str
    about: str
    expect: str
    before: str | None
    overlapped: RelayRow
    serial: RelayRow
    v1: DraftRow
    v2: DraftRow
    defaults: Mapping[str, str]
    staged_hazards: tuple[str, ...] = ()
    known_defects: tuple[str, ...] = ()
    refuses: Mapping[tuple[str, str], str] = field(default_factory=dict)
    staged: Callable[[RelayRow], RelayRow] = rows.unstaged


_SENTINELS = "until #26020 a speculative step's lengths are sentinels that only a blocking copy resolves"
_ONLY_BLOCKING = {("seq_lens_cpu", value): _SENTINELS for value in ("private", "bound")}
_NO_RING = {("index", "ring"): "the ring ended with #25862, and this state's tokens lie by request slot"}
_UNADVANCED = "between forwards this state's device lengths are sentinels that nothing may advance"
_SENTINEL_LENGTHS = {
    ("dead_publish", "off"): "here publish is not dead: a decode's lengths come from it",
    ("preparation", "fused"): _UNADVANCED,
}
_BEFORE_25945 = (NEGATIVE_IDS, ONE_SIDED_MERGE)


def _state(
    name: str,
    pr: str,
    about: str,
    expect: str,
    before: str | None,
    overlapped: RelayRow,
    v1: DraftRow,
    v2: DraftRow,
    *,
    serially: Callable[[RelayRow], RelayRow] = rows.serial_without_relay,
    known_defects: tuple[str, ...] = _BEFORE_25945,
    refuses: Mapping[tuple[str, str], str] = _NO_RING,
    staged: Callable[[RelayRow], RelayRow] = rows.unstaged,
    staged_hazards: tuple[str, ...] = (),
) -> State:
    """``serially`` makes the row of the serial loop."""
    row, defaults = serially(overlapped), rows.switch_values(overlapped, v2)
    described = (name, pr, about, expect, before)
    return State(
        *described, overlapped, row, v1, v2, defaults, staged_hazards, known_defects, refuses, staged
    )


_STATES = {
    state.name: state
    for state in (
        _state(
            "pr25774-before",
            "#25774",
            "the bridge is output_ids; a ring FutureMap; placeholders are negated slots",
            "a decode makes its slots (arange) and placeholders on the schedule stream; each filter of rows costs "
            "a blocking .sum().item()",
            None,
            rows.PR25774_BEFORE,
            rows.V1_OUTPUT_IDS,
            rows.V2_EVENT,
            serially=rows.serial_with_output_ids,
            refuses=_ONLY_BLOCKING,
        ),
        _state(
            "pr25774",
            "#25774",
            "the bridge is input_ids, one field less to filter and merge",
            "nothing measurable: the same copies, one kernel more in a mixed step, one field less",
            "pr25774-before",
            rows.PR25774,
            rows.V1_INPUT_IDS,
            rows.V2_EVENT,
            refuses=_ONLY_BLOCKING,
        ),
        _state(
            "pr25944-before",
            "#25944",
            "the FutureMap is indexed by request slot; rows leave without reading lengths back",
            "no arange, no .sum().item(); stash becomes an index_put (#25862, #25818: not this pull request's)",
            "pr25774",
            rows.PR25944_BEFORE,
            rows.V1_ROTATING,
            rows.V2_SENTINEL,
            refuses=_NO_RING | _ONLY_BLOCKING,
        ),
        _state(
            "pr25944",
            "#25944",
            "lengths go through the FutureMap; ids and lengths share a sentinel between forwards",
            "+1 pageable H2D per decode on the schedule stream (two where steps mix); six more kernels on the forward "
            "stream: gather, compare, all, assert, and two to publish",
            "pr25944-before",
            rows.PR25944,
            rows.V1_ROTATING,
            rows.V2_SENTINEL,
            refuses=_NO_RING | _ONLY_BLOCKING | _SENTINEL_LENGTHS,
        ),
        _state(
            "pr26020",
            "#26020",
            "the lengths' sentinel is gone: the batch owns device and host lengths as a pair",
            "that H2D and the gather with its assert disappear; publish stays, a dead write",
            "pr25944",
            rows.PR26020,
            rows.V1_ROTATING,
            rows.V2_PAIR,
        ),
        _state(
            "pr26425-before",
            "#26425",
            "prompts are flattened by numpy instead of a Python list",
            "less host time per prompt token (#25098: not this pull request's)",
            "pr26020",
            rows.PR26425_BEFORE,
            rows.V1_ROTATING,
            rows.V2_PAIR,
        ),
        _state(
            "pr26425",
            "#26425",
            "request slots are mirrored on the host",
            "nothing without hierarchical sparse attention: its step would lose a blocking D2H",
            "pr26425-before",
            rows.PR26425,
            rows.V1_ROTATING,
            rows.V2_PAIR,
        ),
        _state(
            "pr25945-before",
            "#25945",
            "a write-after-read barrier at the top of the loop",
            "a blocking copy of a prefill now waits for the previous forward; the schedule's kernels run between "
            "forwards (#26380: not this pull request's)",
            "pr26425",
            rows.PR25945_BEFORE,
            rows.V1_ROTATING,
            rows.V2_PRIVATE,
        ),
        _state(
            "pr25945",
            "#25945",
            "prompt ids are staged pinned and uploaded on the forward stream; the relay is always on",
            "the prompt's H2D moves to the forward stream, an O(tokens) kernel disappears; serial penalties cost a "
            "blocking upload",
            "pr25945-before",
            rows.PR25945,
            rows.V1_ROTATING,
            rows.V2_STAGED,
            serially=rows.serial_with_relay,
            known_defects=(),
            staged=rows.staged_twice,
            staged_hazards=(STAGED_LATE,),
        ),
        _state(
            "latest",
            "",
            "the best known: a decode's bookkeeping in one launch, one packed upload per prefill, no blocking upload, "
            "no dead write, a read-done event instead of the barrier, exact penalties",
            "less host time per step; the schedule's kernels run beside the forward; no copy of a prefill waits",
            "pr25945",
            rows.LATEST,
            rows.V1_LATEST,
            rows.V2_LATEST,
            serially=rows.serial_with_relay,
            known_defects=(),
            staged=rows.staged_in_order,
        ),
    )
}
assert tuple(_STATES) == STATE_NAMES, "not the states of names.py in their order"


def states() -> Mapping[str, State]:
    return _STATES
