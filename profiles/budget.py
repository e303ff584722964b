"""Budgets: the most that any single step of a kind may do on a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .metrics.counts import CountsSink, Tally
from .metrics.lines import KERNEL_COPY, CallLine, CopyLine, Cost
from .rows import NamedPlace, named_tallies, stream_name
from .timeline import Names, Site

Budget = Mapping[str, Mapping[str, Mapping[str, int]]]  # kind -> stream -> counter -> allowed per step


class Offender(NamedTuple):
    """A source line that made some of what was counted, over all steps of the kind."""

    site: Site | None
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


def breaches(budget: Budget, counts: CountsSink, names: Names) -> list[Breach]:
    """What was broken, in the budget's order. A kind without steps breaks nothing: see ``untested``."""
    tallies = named_tallies(counts.tallies(), names)
    broken = []
    for place, allowed in _entries(budget):
        tally = tallies.get(place)
        if tally is not None and tally.max > allowed:
            broken.append(_breach(place, allowed, tally, _offenders(place, counts, names)))
    return broken


def untested(budget: Budget, counts: CountsSink) -> list[str]:
    """Kinds of the budget that no step had, so that keeping it means nothing."""
    return [kind for kind in budget if not counts.steps[kind]]


def _entries(budget: Budget) -> Iterable[tuple[NamedPlace, int]]:
    for kind, streams in budget.items():
        for stream, counters in streams.items():
            for counter, allowed in counters.items():
                yield NamedPlace(kind, stream, counter), allowed


def _breach(place: NamedPlace, allowed: int, tally: Tally, offenders: tuple[Offender, ...]) -> Breach:
    return Breach(place.kind, place.stream, place.counter, allowed, tally.max, tally.steps_with, offenders)


def _offenders(place: NamedPlace, counts: CountsSink, names: Names) -> tuple[Offender, ...]:
    found: dict[tuple[Site | None, str], int] = {}
    lines: list[tuple[CopyLine | CallLine, Cost]] = [
        *counts.lines.copies.items(),
        *counts.lines.calls.items(),
    ]
    for line, cost in lines:
        if _counts_for(line, place, names):
            key = (names.sites[line.site] if line.site >= 0 else None, line.range)
            found[key] = found.get(key, 0) + cost.count
    ordered = sorted(found.items(), key=lambda entry: (-entry[1], str(entry[0])))
    return tuple(Offender(site, where, times) for (site, where), times in ordered)


def _counts_for(line: CopyLine | CallLine, place: NamedPlace, names: Names) -> bool:
    kind_fits = line.kind == place.kind or line.kind.startswith(f"{place.kind}.")
    if not kind_fits or stream_name(names, line.stream) != place.stream:
        return False
    if isinstance(line, CallLine):
        return place.counter == "sync" and line.sync
    direction, _, quality = place.counter.partition("_")
    if line.direction != direction or line.direction == KERNEL_COPY:
        return False
    return not quality or quality == line.host_memory or (quality == "blocking" and line.blocking)
