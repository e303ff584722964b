"""What was found, once per pair of places, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...record.hazards import FoundAccess, FoundHazard, HazardKind
from ...record.timeline import NO_SITE, Site
from .clocks import HOST
from .shadows import Entry, IssuedOp, Owner, Shadow


class _Raw(NamedTuple):
    kind: HazardKind
    owner: Owner
    first: IssuedOp
    first_writes: bool
    second: IssuedOp
    second_writes: bool


class Findings:
    """Kept as they were met, first; named when somebody asks."""

    def __init__(self) -> None:
        self._found: dict[object, _Raw] = {}

    def add(self, shadow: Shadow, entry: Entry, launch: IssuedOp, *, write: bool) -> None:
        kind: HazardKind = "freed" if entry.freed else "pinned" if shadow.pinned else "race"
        raw = _Raw(kind, entry.freed or shadow.owner, entry.launch, entry.write, launch, write)
        self._found.setdefault(_alike(raw), raw)

    def __len__(self) -> int:
        return len(self._found)

    def named(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[FoundHazard, ...]:
        return tuple(_finding(raw, sites, streams) for raw in self._found.values())


def _alike(raw: _Raw) -> object:
    """Layers of one pool are one resource."""
    owner = re.sub(r"\[\d+\]", "", raw.owner.name) or raw.owner[1:]
    return (
        raw.kind,
        owner,
        *((x.actor, x.op, x.site) for x in (raw.first, raw.second)),
        raw.first_writes,
        raw.second_writes,
    )


def _finding(raw: _Raw, sites: Sequence[Site], streams: Mapping[int, str]) -> FoundHazard:
    first = touched(raw.first, sites, streams, write=raw.first_writes)
    second = touched(raw.second, sites, streams, write=raw.second_writes)
    owner = raw.owner
    resource = owner.name or f"result of {owner.op}{_at(_site(owner.site, sites))}"
    if raw.kind == "freed":
        resource = f"freed block of {resource}"
    return FoundHazard(raw.kind, resource, first, second, _missing(raw.kind, first, second))


def touched(
    launch: IssuedOp, sites: Sequence[Site], streams: Mapping[int, str], *, write: bool
) -> FoundAccess:
    """An access by its names."""
    actor = launch.actor
    stream = streams.get(actor - 1, "host" if actor == HOST else f"stream {actor - 1}")
    return FoundAccess(launch.op, write, _site(launch.site, sites), stream)


def _site(index: int, sites: Sequence[Site]) -> Site | None:
    return None if index == NO_SITE else sites[index]


def _missing(kind: HazardKind, first: FoundAccess, second: FoundAccess) -> str:
    earlier, later = told(first), told(second)
    if kind == "freed":
        return (
            f"{earlier} was pending when the block was freed, and {later} re-used it: "
            f"no record_stream({first.stream}), no reference kept until then, and no wait between them"
        )
    if second.stream == "host":
        return f"{earlier} must come before {later}: the host did not wait for it"
    return f"{earlier} must come before {later}: no wait_stream or event between them"


def told(touch: FoundAccess) -> str:
    """An access in words."""
    who = "the host" if touch.stream == "host" else f"the {touch.stream} stream"
    return f"{who}'s {'write' if touch.write else 'read'} ({touch.op}{_at(touch.site)})"


def _at(site: Site | None) -> str:
    return f" at {site.file}:{site.line}" if site else ""
