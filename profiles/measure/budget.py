"""Budgets: the most that any step of a kind may do on a stream, checked against fresh and stored results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...scenarios.conditions import unmet
from ...scenarios.diagnosis import diagnose
from ...scenarios.problems import KeyPath, ScenarioError, ScenarioSource, SourceLocation
from ...scenarios.schema import Expectation, Kind
from ..record.result import CopyRow, CountSummary, Result, SitePart, SyncRow
from .steps import STEADY, without_steps

# kind -> stream -> counter -> allowed per step
Budget = Mapping[Any, Mapping[Any, Mapping[Any, int]]]


class _Expectation(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, int]] = Field(init=False)

    when: dict[str, bool | int | float | str] = {}


class _Stored(BaseModel):
    expect: dict[str, _Expectation] = {}


class _Given(BaseModel):
    expect: dict[Kind, Expectation]


def given(kind: str, streams: Mapping[str, Mapping[str, int]]) -> Budget:
    """The budget of one kind of step. Raises ScenarioError for a kind, stream or counter that does not exist."""
    document = {"expect": {kind: {stream: dict(counters) for stream, counters in streams.items()}}}
    try:
        _Given.model_validate(document)
    except ValidationError as error:
        path: KeyPath = ("expect", kind)
        inner = [
            (*path, stream, *counter)
            for stream in streams
            for counter in ((), *((c,) for c in streams[stream]))
        ]
        places = dict.fromkeys([(), path[:1], path, *inner], SourceLocation("budget"))
        raise ScenarioError(diagnose(error, root=_Given, source=ScenarioSource(places)).values()) from None
    return document["expect"]


class AskedBudget(NamedTuple):
    """The budget that a result has to keep, and by kind of step why the rest of its scenario's budget is not asked."""

    budget: Budget
    not_asked: Mapping[str, str]


def asked(result: Result) -> AskedBudget:
    """What the scenario of a fresh or stored result asks of it; nothing where it has no valid budget."""
    try:
        expect = _Stored.model_validate(result.scenario.expanded).expect
        not_asked = {
            kind: reason for kind, entry in expect.items() if (reason := _why_not(kind, entry, result))
        }
    except (ValidationError, ScenarioError):
        return AskedBudget({}, {})
    budget = {kind: entry.__pydantic_extra__ for kind, entry in expect.items() if kind not in not_asked}
    return AskedBudget(budget, not_asked)


def _why_not(kind: str, entry: _Expectation, result: Result) -> str:
    if reason := result.uncounted.get(kind.removesuffix(STEADY)):
        return reason
    overlap = result.relay.loop == "overlapped"
    return unmet(entry.when, result.scenario.expanded, relay=result.relay.state, overlap=overlap)


class Offender(NamedTuple):
    """A source line that contributed to a count, ``times`` over all steps of the kind."""

    site: SitePart | None
    range: str
    times: int


class Breach(NamedTuple):
    kind: str
    stream: str
    counter: str
    allowed: int
    seen: int  # in the worst step
    steps_with: int  # steps that had any at all
    offenders: tuple[Offender, ...]  # most frequent first


def breaches(budget: Budget, result: Result) -> list[Breach]:
    """The broken budgets, in order. A kind without steps breaks none: see ``untested``."""
    broken = []
    for kind, stream, counter, allowed in _entries(budget):
        found = tallies(result, kind, stream, counter)
        seen = max((tally.max for tally in found), default=0)
        if seen > allowed:
            offenders = _offenders(result, kind=kind, stream=stream, counter=counter)
            steps_with = sum(tally.steps_with for tally in found)
            broken.append(Breach(kind, stream, counter, allowed, seen, steps_with, offenders))
    return broken


def untested(budget: Budget, result: Result) -> list[str]:
    """Kinds of the budget that no step had, whose budget is therefore untested."""
    return [kind for kind in budget if kind not in result.per_step]


def untested_text(kind: str, result: Result) -> str:
    others = f", only of {', '.join(result.per_step)}" if result.per_step else ""
    return f"{without_steps(kind)}{others}; its budget is untested"


def _entries(budget: Budget) -> Iterator[tuple[str, str, str, int]]:
    for kind, streams in budget.items():
        for stream, counters in streams.items():
            for counter, allowed in counters.items():
                yield kind, stream, counter, allowed


def tallies(result: Result, kind: str, stream: str, counter: str) -> list[CountSummary]:
    """One summary for each rank that counted it."""
    kinds = [per_step[kind].streams for per_step in result.per_step_of_ranks if kind in per_step]
    return [streams[stream][counter] for streams in kinds if counter in streams.get(stream, {})]


def _offenders(result: Result, *, kind: str, stream: str, counter: str) -> tuple[Offender, ...]:
    """The source lines that contributed. They are unknown for kernels, which are not kept by source line."""
    found: dict[tuple[SitePart | None, str], int] = {}
    base = kind.removesuffix(STEADY)
    rows: tuple[CopyRow | SyncRow, ...] = (*result.copies, *result.syncs)
    for row in rows:
        if row.kind == base and row.stream == stream and _counted(row, counter):
            times = row.count if kind == base else row.steady
            found[row.site, row.range] = found.get((row.site, row.range), 0) + times
    offenders = (Offender(site, where, times) for (site, where), times in found.items() if times)
    return tuple(sorted(offenders, key=lambda offender: (-offender.times, str(offender))))


def _counted(row: CopyRow | SyncRow, counter: str) -> bool:
    if isinstance(row, SyncRow):
        return counter == "sync" and row.sync
    direction, _, quality = counter.partition("_")
    return (
        row.direction == direction != "kernel"
        and (not quality or quality == row.host_memory or (quality == "blocking" and row.blocking))
    )  # fmt: skip
