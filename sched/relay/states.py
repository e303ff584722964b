"""The states of the ladder, one row of policies per loop, and the switches that change single policies.

A state mirrors an upstream commit, slow and wrong where that was; ``latest`` is where we do better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from . import lengths, ordering, penalties, prompt, tokens
from .row import Row


class RelayError(ValueError):
    """A state or switch that does not exist, or a combination that has no working form."""


@dataclass(frozen=True, slots=True)
class State:
    """One rung: ``pr`` is the upstream pull request, ``expect`` what a reader should see change."""

    name: str
    pr: str
    about: str
    overlapped: Row
    serial: Row
    defaults: Mapping[str, str]
    known_hazards: tuple[str, ...] = ()


def _serial(row: Row) -> Row:
    """The same state in the loop without overlap: one stream, nothing in flight while the schedule works."""
    return replace(
        row,
        barrier=ordering.no_barrier,
        isolate=ordering.resolve_in_place,
        advance=lengths.advance_in_place,
        publish=ordering.nothing,
        keep_alive=ordering.keep_nothing,
    )


_PR25945 = Row(
    barrier=ordering.barrier_at_top,
    stage_prompt=prompt.stage_pinned,
    prepare_input=ordering.nothing,
    advance=lengths.advance_new_tensor,
    penalty_tokens=penalties.FromRequests,
    sampling_tensors="pageable",
    allocation_lengths=lengths.allocate_by_batch_lengths,
    mix=tokens.mix_by_index,
    open=ordering.nothing,
    host_lengths=lengths.lengths_mirrored,
    host_indices=lengths.indices_mirrored,
    isolate=ordering.resolve_then_isolate,
    resolve=tokens.resolve_late,
    publish=tokens.publish_next_lengths,
    stash=tokens.stash_by_row,
    keep_alive=ordering.keep_in_ring,
    reads_done=ordering.nothing,
    conclude=tokens.drop_input,
    filter=tokens.filter_input,
    merge=tokens.merge_input_two_sided,
)

_LATEST = replace(_PR25945, penalty_tokens=penalties.OnDevice, resolve=tokens.resolve_late_recorded)

# What a switch's value changes in a row.
_SWITCHES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "barrier": {
        "off": {"barrier": ordering.no_barrier},
        "top": {"barrier": ordering.barrier_at_top},
    },
    "staging": {
        "pinned": {"stage_prompt": prompt.stage_pinned},
        "pageable": {"stage_prompt": prompt.stage_pageable},
    },
    "sampling_tensors": {
        "pageable": {"sampling_tensors": "pageable"},
        "pinned": {"sampling_tensors": "pinned"},
        "packed": {"sampling_tensors": "packed"},
    },
    "dead_publish": {
        "on": {"publish": tokens.publish_next_lengths},
        "off": {"publish": ordering.nothing},
    },
    "penalties": {
        "upstream": {"penalty_tokens": penalties.FromRequests},
        "exact": {"penalty_tokens": penalties.OnDevice},
    },
}
# Switches about streams: a loop with a single one has nothing to switch.
_OVERLAPPED_ONLY = frozenset({"barrier", "dead_publish"})

_DEFAULTS = {
    "barrier": "top",
    "staging": "pinned",
    "sampling_tensors": "pageable",
    "dead_publish": "on",
    "penalties": "upstream",
}

_STATES = {
    state.name: state
    for state in (
        State(
            "pr25945",
            "#25945",
            "prompt ids are staged pinned and uploaded on the forward stream; the relay is always on",
            _PR25945,
            _serial(_PR25945),
            _DEFAULTS,
            ("mix_running_indices lifetime",),
        ),
        State(
            "latest",
            "",
            "the best known: as pr25945, exact penalties on the device, mix_running_indices kept alive",
            _LATEST,
            _serial(_LATEST),
            {**_DEFAULTS, "penalties": "exact"},
        ),
    )
}


@dataclass(frozen=True, slots=True)
class RelayChoice:
    """A state with its switches resolved."""

    state: State
    switches: Mapping[str, str]
    overrides: Mapping[str, str] = field(default_factory=dict)

    def row(self, *, overlap: bool) -> Row:
        row = self.state.overlapped if overlap else self.state.serial
        for name, value in self.overrides.items():
            if overlap or name not in _OVERLAPPED_ONLY:
                row = replace(row, **_SWITCHES[name][value])
        return row


def states() -> Mapping[str, State]:
    return _STATES


def switches() -> Mapping[str, tuple[str, ...]]:
    """Every switch and the values it takes."""
    return {name: tuple(values) for name, values in _SWITCHES.items()}


def choose(name: str, overrides: Mapping[str, str]) -> RelayChoice:
    """The state ``name`` with some switches set. Raises RelayError for an unknown state, switch or value."""
    if name not in _STATES:
        raise RelayError(f"no relay state {name!r}; there are {', '.join(_STATES)}")
    for switch, value in overrides.items():
        if switch not in _SWITCHES:
            raise RelayError(f"no relay switch {switch!r}; there are {', '.join(_SWITCHES)}")
        if value not in _SWITCHES[switch]:
            raise RelayError(f"relay switch {switch} is one of {', '.join(_SWITCHES[switch])}, not {value!r}")
    state = _STATES[name]
    return RelayChoice(state, {**state.defaults, **overrides}, overrides)
