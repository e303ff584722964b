"""A state as a run uses it: with its switches resolved, faults injected, and hazards declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from . import ordering, rows, tokens
from .drafts import resolve_on_the_forward_stream
from .faults import Fault, Loop
from .names import ALIASES, SWITCH_VALUES
from .row import DraftRow, RelayRow, Speculation
from .rows import DRAFT_SWITCHES, OVERLAPPED_ONLY, SWITCHES
from .states import (
    CHUNK_REWRITE,
    DEAD_PUBLISH,
    DEAD_STASH,
    DRAFT_LENGTHS,
    PAGE_TABLE_REWRITE,
    PENALTY_STATE,
    ROUND_TRIP,
    SLOT_REUSE,
    SPLIT_TOKENS,
    State,
    states,
)

_ALL_SWITCHES = {**SWITCHES, **DRAFT_SWITCHES}
assert {name: tuple(values) for name, values in _ALL_SWITCHES.items()} == SWITCH_VALUES, "not as in names.py"


class RelayError(ValueError):
    """A state or switch that does not exist, or a combination that has no working form."""


# Pairs of schedule writes and forward reads that each barrier leaves unordered.
_BARRIER_HAZARDS: Mapping[str, tuple[str, ...]] = {
    "off": (SLOT_REUSE, PAGE_TABLE_REWRITE),
    "top": (PAGE_TABLE_REWRITE,),
    "after-launch": (),
    "read-done": (),
}


@dataclass(frozen=True, slots=True)
class RelayChoice:
    """A state with its switches resolved and faults injected."""

    state: State
    switches: Mapping[str, str]
    overrides: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    def row(self, *, overlap: bool, speculation: Speculation | None = None, staged: bool = False) -> RelayRow:
        """The row for one loop, new on each call, since a fault's policy may have a state. ``staged``: for a pipeline's
        stage, which runs the serial loop with several batches in flight."""
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
        self,
        fault: Fault,
        *,
        overlap: bool,
        speculation: Speculation | None = None,
        staged: bool = False,
        onebatch: bool = False,
    ) -> RelayChoice:
        """The same choice with one more fault. ``onebatch``: for a static batch, which the serial row runs. Raises
        RelayError where the fault does not apply."""
        loop = "onebatch" if onebatch else loop_of(overlap=overlap, staged=staged)
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
        row = self.row(overlap=overlap, speculation=speculation, staged=staged)
        drafts = self.draft_row(speculation)
        changed = difference(row, fault.change(row))
        if drafts is not None:
            changed |= difference(drafts, fault.change_drafts(drafts))
        if fault.appends and not changed:
            raise RelayError(
                f"fault {fault.name} changes nothing in {self.state.name} as it is switched here"
            )
        return replace(self, faults=(*self.faults, fault))

    def known_hazards(
        self,
        *,
        overlap: bool = True,
        speculation: Speculation | None = None,
        staged: bool = False,
        split: bool = False,
    ) -> tuple[str, ...]:
        """Races of upstream's state, and writes that are never read. A single stream has none. ``split``: prompts run
        beside decodes."""
        if staged:
            return self._hazards_of_stages()
        if split:
            kept = replace(self, faults=()).row(overlap=False).conclude is tokens.conclude_input_ids
            return (SPLIT_TOKENS,) if kept else ()
        if not overlap:
            return ()
        sound = replace(self, faults=())
        row, drafts = sound.row(overlap=True, speculation=speculation), sound.draft_row(speculation)
        barrier = self.switches["barrier"]
        ahead = drafts is not None and drafts.resolve is resolve_on_the_forward_stream and barrier == "off"
        read = drafts is not None or ("dead_publish", "off") in self.state.refuses
        # From #25945 on the forward accumulates penalties itself, unordered with the schedule's counting.
        late = row.isolate is ordering.resolve_then_isolate
        counts = late and self.switches["penalties"] == "upstream" and barrier == "off"
        return (
            *_BARRIER_HAZARDS[barrier],
            *((PENALTY_STATE,) if counts else ()),
            *((DRAFT_LENGTHS,) if ahead else ()),
            *((DEAD_PUBLISH,) if self.switches["dead_publish"] == "on" and not read else ()),
        )

    def _hazards_of_stages(self) -> tuple[str, ...]:
        sound = replace(self, faults=()).row(overlap=False, staged=True)
        unordered = sound.barrier is ordering.no_barrier
        kept = sound.conclude is not tokens.drop_input
        twice = kept and sound.stash is not tokens.stash_nothing
        return (
            *self.state.staged_hazards,
            *((CHUNK_REWRITE,) if unordered else ()),
            *((ROUND_TRIP,) if kept else ()),
            *((DEAD_STASH,) if twice else ()),
        )

    def policies(
        self, *, overlap: bool, speculation: Speculation | None = None, staged: bool = False
    ) -> dict[str, str]:
        """The name of each question's policy; questions of speculation are prefixed by its mode."""
        drafts = self.draft_row(speculation)
        names = _policy_names(self.row(overlap=overlap, speculation=speculation, staged=staged))
        return names if drafts is None else names | _policy_names(drafts, f"{speculation}.")


def _policy_names(row: RelayRow | DraftRow, prefix: str = "") -> dict[str, str]:
    return {f"{prefix}{entry.name}": policy_name(getattr(row, entry.name)) for entry in fields(row)}


def loop_of(*, overlap: bool, staged: bool = False) -> Loop:
    return "pipelined" if staged else "overlapped" if overlap else "serial"


def choose(name: str | State, overrides: Mapping[str, str]) -> RelayChoice:
    """The state, or that of the ladder with the name, with some switches set. Raises RelayError for an unknown state,
    switch or value, and for a combination that the state refuses."""
    state = named(name)
    if state is None:
        raise RelayError(f"no relay state {name!r}; there are {', '.join((*states(), *ALIASES))}")
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


def named(name: str | State) -> State | None:
    """The state of the ladder with the name; None if there is none."""
    return name if isinstance(name, State) else states().get(ALIASES.get(name, name))


def refusals(name: str | State, overrides: Mapping[str, str]) -> list[str]:
    """Why the state has no working form with some of these switches; empty for an unknown one."""
    state = named(name)
    reasons = {} if state is None else state.refuses
    shown = name if isinstance(name, str) else name.name
    return [
        f"{shown} with {switch}={value}: {reasons[switch, value]}"
        for switch, value in overrides.items()
        if (switch, value) in reasons
    ]


def difference(before: RelayRow | DraftRow, after: RelayRow | DraftRow) -> dict[str, tuple[str, str]]:
    """The questions whose policies differ between two rows, with the names of both policies."""
    pairs = {
        question.name: (getattr(before, question.name), getattr(after, question.name))
        for question in fields(after)
    }
    return {name: (policy_name(a), policy_name(b)) for name, (a, b) in pairs.items() if a is not b}


def changes(before: State, after: State) -> dict[str, tuple[str, str]]:
    """``difference`` of two states' rows for the overlapped loop and for speculative workers."""
    found = difference(before.overlapped, after.overlapped)
    for mode, rows_of in (("v1", (before.v1, after.v1)), ("v2", (before.v2, after.v2))):
        found |= {f"{mode}.{question}": names for question, names in difference(*rows_of).items()}
    return found


def policy_name(policy: Any) -> str:
    """A policy's name; that of a partial is its first argument's."""
    given = getattr(policy, "args", ())
    return policy if isinstance(policy, str) else str((given[0] if given else policy).__name__)
