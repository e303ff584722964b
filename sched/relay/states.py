"""The ladder: every state with its pull request, its switches, what to expect of it and which races it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from . import draft_rows, ordering, placeholders, rows, tokens
from .draft_row import DraftRow, Speculation
from .draft_rows import DRAFT_SWITCHES
from .drafts import resolve_on_the_forward_stream
from .faults import Fault, Loop
from .row import Row
from .switches import OVERLAPPED_ONLY, SWITCHES

_ALL_SWITCHES = {**SWITCHES, **DRAFT_SWITCHES}


class RelayError(ValueError):
    """A state or switch that does not exist, or a combination that has no working form."""


@dataclass(frozen=True, slots=True)
class State:
    """One rung. ``expect`` is what a reader should see change against ``before``; ``refuses`` says why a switch's value
    has no working form here; ``staged`` makes a pipeline stage's row of the serial one."""

    name: str
    pr: str
    about: str
    expect: str
    before: str | None
    overlapped: Row
    serial: Row
    v1: DraftRow
    v2: DraftRow
    defaults: Mapping[str, str]
    known_hazards: tuple[str, ...] = ()
    known_defects: tuple[str, ...] = ()
    refuses: Mapping[tuple[str, str], str] = field(default_factory=dict)
    staged: Callable[[Row], Row] = rows.unstaged


_EARLY = {
    "barrier": "off",
    "flatten": "list",
    "staging": "pinned",
    "sampling_tensors": "pageable",
    "index": "ring",
    "dead_publish": "off",
    "penalties": "upstream",
    "preparation": "split",
    "backup_indices": "blocking",
    "seq_lens_cpu": "blocking",
}
_POOL = {**_EARLY, "index": "pool"}
_PUBLISHING = {**_POOL, "dead_publish": "on"}
_NUMPY = {**_PUBLISHING, "flatten": "numpy"}
_BARRIER = {**_NUMPY, "barrier": "top", "seq_lens_cpu": "private"}
_LATEST = {
    **_NUMPY,
    "barrier": "read-done",
    "sampling_tensors": "packed",
    "dead_publish": "off",
    "penalties": "exact",
    "preparation": "fused",
    "backup_indices": "none",
    "seq_lens_cpu": "bound",
}

_ONLY_BLOCKING = {
    (
        "seq_lens_cpu",
        value,
    ): "until #26020 a speculative step's lengths are sentinels that only a blocking copy clears up"
    for value in ("private", "bound")
}
_NO_RING = {("index", "ring"): "the ring ended with #25862, and this state's tokens lie by request slot"}
_SENTINEL_LENGTHS = {
    ("dead_publish", "off"): "here publish is not dead: a decode's lengths come from it",
    (
        "preparation",
        "fused",
    ): "between forwards this state's device lengths are sentinels that nothing may advance",
}
NEGATIVE_IDS = "negative ids: a prompt's id below zero is taken for a placeholder and replaced"
ONE_SIDED_MERGE = "one-sided merge: a side without token ids fails, or loses the other side's"
_BEFORE_25945 = (NEGATIVE_IDS, ONE_SIDED_MERGE)
STAGED_LATE = "mixed steps: mix_running_indices is freed before the forward stream has gathered with it"

_STATES = {
    state.name: state
    for state in (
        State(
            "pr25774-before",
            "#25774",
            "the bridge is output_ids; a ring FutureMap; placeholders are negated slots",
            "a decode makes its slots (arange) and placeholders on the schedule stream; whoever leaves costs a "
            "blocking .sum().item()",
            None,
            rows.PR25774_BEFORE,
            rows.serial_with_output_ids(rows.PR25774_BEFORE),
            draft_rows.V1_OUTPUT_IDS,
            draft_rows.V2_EVENT,
            _EARLY,
            known_defects=_BEFORE_25945,
            refuses=_ONLY_BLOCKING,
        ),
        State(
            "pr25774",
            "#25774",
            "the bridge is input_ids, one field less to filter and merge",
            "nothing measurable: the same copies and kernels, one field less",
            "pr25774-before",
            rows.PR25774,
            rows.serial_without_relay(rows.PR25774),
            draft_rows.V1_INPUT_IDS,
            draft_rows.V2_EVENT,
            _EARLY,
            known_defects=_BEFORE_25945,
            refuses=_ONLY_BLOCKING,
        ),
        State(
            "pr25944-before",
            "#25944",
            "the FutureMap is indexed by request slot; rows leave without reading lengths back",
            "no arange, no .sum().item(); stash becomes an index_put (#25862, #25818: not this pull request's)",
            "pr25774",
            rows.PR25944_BEFORE,
            rows.serial_without_relay(rows.PR25944_BEFORE),
            draft_rows.V1_ROTATING,
            draft_rows.V2_SENTINEL,
            _POOL,
            known_defects=_BEFORE_25945,
            refuses=_NO_RING | _ONLY_BLOCKING,
        ),
        State(
            "pr25944",
            "#25944",
            "lengths go through the FutureMap; ids and lengths share a sentinel between forwards",
            "+1 pageable H2D per decode on the schedule stream (two where steps mix); six more kernels on the forward "
            "stream: gather, compare, all, assert, and two to publish",
            "pr25944-before",
            rows.PR25944,
            rows.serial_without_relay(rows.PR25944),
            draft_rows.V1_ROTATING,
            draft_rows.V2_SENTINEL,
            _PUBLISHING,
            known_defects=_BEFORE_25945,
            refuses=_NO_RING | _ONLY_BLOCKING | _SENTINEL_LENGTHS,
        ),
        State(
            "pr26020",
            "#26020",
            "the lengths' sentinel is gone: the batch owns device and host lengths as a pair",
            "that H2D and the gather with its assert disappear; publish stays, a dead write",
            "pr25944",
            rows.PR26020,
            rows.serial_without_relay(rows.PR26020),
            draft_rows.V1_ROTATING,
            draft_rows.V2_PAIR,
            _PUBLISHING,
            known_defects=_BEFORE_25945,
            refuses=_NO_RING,
        ),
        State(
            "pr26425-before",
            "#26425",
            "prompts are flattened by numpy instead of a Python list",
            "less host time per prompt token (#25098: not this pull request's)",
            "pr26020",
            rows.PR26425_BEFORE,
            rows.serial_without_relay(rows.PR26425_BEFORE),
            draft_rows.V1_ROTATING,
            draft_rows.V2_PAIR,
            _NUMPY,
            known_defects=_BEFORE_25945,
            refuses=_NO_RING,
        ),
        State(
            "pr26425",
            "#26425",
            "request slots are mirrored on the host",
            "nothing without hierarchical sparse attention: its step would lose a blocking D2H",
            "pr26425-before",
            rows.PR26425,
            rows.serial_without_relay(rows.PR26425),
            draft_rows.V1_ROTATING,
            draft_rows.V2_PAIR,
            _NUMPY,
            known_defects=_BEFORE_25945,
            refuses=_NO_RING,
        ),
        State(
            "pr25945-before",
            "#25945",
            "a write-after-read barrier at the top of the loop",
            "a blocking copy of a prefill now waits for the previous forward; the schedule's kernels run between "
            "forwards (#26380: not this pull request's)",
            "pr26425",
            rows.PR25945_BEFORE,
            rows.serial_without_relay(rows.PR25945_BEFORE),
            draft_rows.V1_ROTATING,
            draft_rows.V2_PRIVATE,
            _BARRIER,
            known_defects=_BEFORE_25945,
            refuses=_NO_RING,
        ),
        State(
            "pr25945",
            "#25945",
            "prompt ids are staged pinned and uploaded on the forward stream; the relay is always on",
            "the prompt's H2D moves to the forward stream, an O(tokens) kernel disappears; serial penalties cost a "
            "blocking upload",
            "pr25945-before",
            rows.PR25945,
            rows.serial_with_relay(rows.PR25945),
            draft_rows.V1_ROTATING,
            draft_rows.V2_STAGED,
            _BARRIER,
            known_hazards=(STAGED_LATE,),
            refuses=_NO_RING,
            staged=rows.staged_twice,
        ),
        State(
            "latest",
            "",
            "the best known: a decode's bookkeeping in one launch, one packed upload per prefill, no blocking upload, "
            "no dead write, a read-done event instead of the barrier, exact penalties",
            "less host time per step; the schedule's kernels run beside the forward; no copy of a prefill waits",
            "pr25945",
            rows.LATEST,
            rows.serial_with_relay(rows.LATEST),
            draft_rows.V1_LATEST,
            draft_rows.V2_LATEST,
            _LATEST,
            refuses=_NO_RING,
            staged=rows.staged_in_order,
        ),
    )
}
ALIASES: Mapping[str, str] = {"pr26020-before": "pr25944"}

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
DEAD_STASH = "dead stash: every step stores tokens that only mixed steps read"
DEAD_PUBLISH = "dead publish: every step publishes lengths that nobody reads"
# What a barrier leaves unordered between the schedule's writes and a forward's reads.
_BARRIER_HAZARDS: Mapping[str, tuple[str, ...]] = {
    "off": (SLOT_REUSE, PAGE_TABLE_REWRITE),
    "top": (PAGE_TABLE_REWRITE,),
    "after-launch": (),
    "read-done": (),
}


@dataclass(frozen=True, slots=True)
class RelayChoice:
    """A state with its switches resolved, and what is broken in it on purpose."""

    state: State
    switches: Mapping[str, str]
    overrides: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    def row(self, *, overlap: bool, speculation: Speculation | None = None, staged: bool = False) -> Row:
        """Made anew by each call: a fault's policy may keep something from step to step. ``staged``: of a pipeline's
        stage, which runs the serial loop with several batches under way."""
        row = self.state.overlapped if overlap else self.state.serial
        if staged:
            row = self.state.staged(row)
        if speculation == "v2" and not overlap:
            row = rows.serial_with_v2(self.state.overlapped)
        for name, value in self.overrides.items():
            if name in SWITCHES and (overlap or name not in OVERLAPPED_ONLY):
                row = replace(row, **SWITCHES[name][value])
        if speculation is not None:
            row = rows.speculating(row, speculation)
        for fault in self.faults:
            row = fault.change(row)
        return row

    def draft_row(self, speculation: Speculation | None) -> DraftRow | None:
        """What the relay answers a speculative worker."""
        if speculation is None:
            return None
        row: DraftRow = {"v1": self.state.v1, "v2": self.state.v2}[speculation]
        for name, value in self.overrides.items():
            if name in DRAFT_SWITCHES and speculation == "v2":
                row = replace(row, **DRAFT_SWITCHES[name][value])
        for fault in self.faults:
            row = fault.change_drafts(row)
        return row

    def broken_by(
        self, fault: Fault, *, overlap: bool, speculation: Speculation | None = None, staged: bool = False
    ) -> RelayChoice:
        """The same with one more fault. Raises RelayError where that one has no place."""
        loop = loop_of(overlap=overlap, staged=staged)
        if self.state.name not in fault.states:
            raise RelayError(
                f"fault {fault.name} belongs to {', '.join(fault.states)}, not to {self.state.name}"
            )
        if loop not in fault.loops:
            raise RelayError(
                f"fault {fault.name} belongs to the {fault.loops[0]} loop, and this run's is {loop}"
            )
        if fault.speculation not in (None, speculation):
            raise RelayError(
                f"fault {fault.name} belongs to speculation {fault.speculation}, and this run's is "
                f"{speculation or 'none'}"
            )
        if not self._changed_by(fault, overlap=overlap, speculation=speculation, staged=staged):
            raise RelayError(
                f"fault {fault.name} changes nothing in {self.state.name} as it is switched here"
            )
        return replace(self, faults=(*self.faults, fault))

    def _changed_by(
        self, fault: Fault, *, overlap: bool, speculation: Speculation | None, staged: bool
    ) -> bool:
        row = self.row(overlap=overlap, speculation=speculation, staged=staged)
        drafts = self.draft_row(speculation)
        changed = difference(row, fault.change(row))
        return bool(changed or (drafts is not None and difference(drafts, fault.change_drafts(drafts))))

    @property
    def known_defects(self) -> tuple[str, ...]:
        """What upstream's state does wrong with batches that it never met."""
        return self.state.known_defects

    def known_hazards(
        self, *, overlap: bool = True, speculation: Speculation | None = None, staged: bool = False
    ) -> tuple[str, ...]:
        """Races that upstream had too, and writes for nothing. One stream has none."""
        if staged:
            return self._hazards_of_stages()
        if not overlap:
            return ()
        sound = replace(self, faults=())
        row, drafts = sound.row(overlap=True, speculation=speculation), sound.draft_row(speculation)
        barrier = self.switches["barrier"]
        mixed = () if drafts is not None else self.state.known_hazards  # speculation does not mix
        ahead = drafts is not None and drafts.resolve is resolve_on_the_forward_stream and barrier == "off"
        read = drafts is not None or ("dead_publish", "off") in self.state.refuses
        return (
            *mixed,
            *_BARRIER_HAZARDS[barrier],
            *((PENALTY_STATE,) if self._counts_under_the_forward(row) else ()),
            *((DRAFT_LENGTHS,) if ahead else ()),
            *((DEAD_PUBLISH,) if self.switches["dead_publish"] == "on" and not read else ()),
        )

    def _hazards_of_stages(self) -> tuple[str, ...]:
        sound = replace(self, faults=()).row(overlap=False, staged=True)
        unordered = sound.barrier is ordering.no_barrier
        kept = sound.conclude is not tokens.drop_input
        twice = kept and sound.stash is not placeholders.stash_nothing
        return (
            *self.state.known_hazards,
            *((CHUNK_REWRITE,) if unordered else ()),
            *((ROUND_TRIP,) if kept else ()),
            *((DEAD_STASH,) if twice else ()),
        )

    def _counts_under_the_forward(self, row: Row) -> bool:
        """Whether the forward itself accumulates penalties (#25945) that the schedule goes on counting, unordered."""
        late = row.isolate is ordering.resolve_then_isolate
        return late and self.switches["penalties"] == "upstream" and self.switches["barrier"] == "off"

    def policies(
        self, *, overlap: bool, speculation: Speculation | None = None, staged: bool = False
    ) -> dict[str, str]:
        """The row in words: each question and its answer's name; those of speculation by its mode."""
        drafts = self.draft_row(speculation)
        words = _words(self.row(overlap=overlap, speculation=speculation, staged=staged))
        return words if drafts is None else words | _words(drafts, f"{speculation}.")


def _words(row: Row | DraftRow, prefix: str = "") -> dict[str, str]:
    return {f"{prefix}{entry.name}": answer_name(getattr(row, entry.name)) for entry in fields(row)}


def loop_of(*, overlap: bool, staged: bool = False) -> Loop:
    return "pipelined" if staged else "overlapped" if overlap else "serial"


def states() -> Mapping[str, State]:
    return _STATES


def switches() -> Mapping[str, tuple[str, ...]]:
    """Every switch and the values it takes."""
    return {name: tuple(values) for name, values in _ALL_SWITCHES.items()}


def choose(name: str, overrides: Mapping[str, str]) -> RelayChoice:
    """The state ``name`` with some switches set. Raises RelayError for an unknown state, switch or value, and for a
    combination that the state refuses."""
    state = _STATES.get(ALIASES.get(name, name))
    if state is None:
        raise RelayError(f"no relay state {name!r}; there are {', '.join((*_STATES, *ALIASES))}")
    for switch, value in overrides.items():
        if switch not in _ALL_SWITCHES:
            raise RelayError(f"no relay switch {switch!r}; there are {', '.join(_ALL_SWITCHES)}")
        if value not in _ALL_SWITCHES[switch]:
            raise RelayError(
                f"relay switch {switch} is one of {', '.join(_ALL_SWITCHES[switch])}, not {value!r}"
            )
    for why in refusals(name, overrides):
        raise RelayError(why)
    changes = {switch: value for switch, value in overrides.items() if value != state.defaults[switch]}
    return RelayChoice(state, {**state.defaults, **overrides}, changes)


def refusals(name: str, overrides: Mapping[str, str]) -> list[str]:
    """Why the state ``name`` has no working form with some of these switches; nothing where there is no such state."""
    state = _STATES.get(ALIASES.get(name, name))
    reasons = {} if state is None else state.refuses
    return [
        f"{name} with {switch}={value}: {reasons[switch, value]}"
        for switch, value in overrides.items()
        if (switch, value) in reasons
    ]


def difference(before: Row | DraftRow, after: Row | DraftRow) -> dict[str, tuple[str, str]]:
    """The questions that two rows answer differently, with both answers' names."""
    pairs = {
        question.name: (getattr(before, question.name), getattr(after, question.name))
        for question in fields(after)
    }
    return {name: (answer_name(a), answer_name(b)) for name, (a, b) in pairs.items() if a is not b}


def changes(before: State, after: State) -> dict[str, tuple[str, str]]:
    """``difference`` of two states in the overlapped loop, and of what they answer speculative workers."""
    found = difference(before.overlapped, after.overlapped)
    for mode, rows_of in (("v1", (before.v1, after.v1)), ("v2", (before.v2, after.v2))):
        found |= {f"{mode}.{question}": names for question, names in difference(*rows_of).items()}
    return found


def answer_name(answer: Any) -> str:
    """What a policy is called; a partial by what it was given."""
    given = getattr(answer, "args", ())
    return answer if isinstance(answer, str) else str((given[0] if given else answer).__name__)
