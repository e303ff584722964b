"""The hazards that were found, once per pair of source lines, and their explanations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ...record.result import HazardAccess, HazardFinding, SitePart
from ...record.timeline import NO_SITE, HazardKind, Site
from ..sites import Sites
from .shadow import IssuedOp, MemoryAccess, MemoryOrigin, NamedMemory, ShadowMemory

FREED: Final = "freed block of "  # a resource's name begins with it where the kind is "freed"


class _UnnamedHazard(NamedTuple):
    """A hazard whose source lines and streams are numbers."""

    kind: HazardKind
    origin: MemoryOrigin
    first: IssuedOp
    first_writes: bool
    second: IssuedOp
    second_writes: bool
    callers: tuple[int, ...]  # of the line of the second

    @property
    def key(self) -> object:
        """Equal for hazards that are reported once: the layers of a pool count as one resource."""
        resource = re.sub(r"\[\d+\]", "", self.origin.name) or self.origin[1:]
        places = ((launch.actor, launch.op, launch.site) for launch in (self.first, self.second))
        return (self.kind, resource, *places, self.first_writes, self.second_writes)


class Findings:
    """Hazards in the order in which they were found."""

    def __init__(self) -> None:
        self._found: dict[object, _UnnamedHazard] = {}

    def add(
        self, shadow: ShadowMemory, earlier: MemoryAccess, launch: IssuedOp, sites: Sites, *, write: bool
    ) -> None:
        """``launch`` is issued by the stack of this call."""
        kind: HazardKind = "freed" if earlier.freed_origin else "pinned" if shadow.pinned else "race"
        hazard = _UnnamedHazard(
            kind, earlier.freed_origin or shadow.origin, earlier.launch, earlier.write, launch, write, ()
        )
        if hazard.key not in self._found:
            self._found[hazard.key] = hazard._replace(callers=sites.callers(launch.site))

    def named(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[HazardFinding, ...]:
        """Streams of one name count as one: an engine may make its streams anew for every run."""
        named = [_named(hazard, sites, streams) for hazard in self._found.values()]
        return tuple({one.identity: one for one in named}.values())


def unread(
    memories: Iterable[NamedMemory], sites: Sequence[Site], streams: Mapping[int, str]
) -> tuple[HazardFinding, ...]:
    """Named memory that was written and never read."""
    found = []
    for memory in memories:
        if memory.last_write is not None and not memory.is_read:
            access = _access(memory.last_write, sites, streams, write=True)
            missing = f"{_described(access)}, the last of {memory.writes} writes, is never read"
            found.append(
                HazardFinding(kind="unread", resource=memory.name, first=access, second=None, missing=missing)
            )
    return tuple(found)


def _named(hazard: _UnnamedHazard, sites: Sequence[Site], streams: Mapping[int, str]) -> HazardFinding:
    first = _access(hazard.first, sites, streams, write=hazard.first_writes)
    second = _access(hazard.second, sites, streams, write=hazard.second_writes)
    second = second.model_copy(update={"callers": tuple(_site(line, sites) for line in hazard.callers)})
    origin = hazard.origin
    resource = origin.name or f"result of {origin.op}{_at(_site(origin.site, sites))}"
    missing = _missing(hazard.kind, _described(first, resource), _described(second), first, second)
    if hazard.kind == "freed":
        resource = f"{FREED}{resource}"
    return HazardFinding(kind=hazard.kind, resource=resource, first=first, second=second, missing=missing)


def _access(
    launch: IssuedOp, sites: Sequence[Site], streams: Mapping[int, str], *, write: bool
) -> HazardAccess:
    number = launch.actor - 1
    stream = streams.get(number, f"stream {number}")
    return HazardAccess(op=launch.op, write=write, site=_site(launch.site, sites), stream=stream)


def _site(index: int, sites: Sequence[Site]) -> SitePart | None:
    return None if index == NO_SITE else SitePart(**sites[index]._asdict())


def _missing(kind: HazardKind, earlier: str, later: str, first: HazardAccess, second: HazardAccess) -> str:
    """``earlier`` and ``later`` describe the accesses ``first`` and ``second``."""
    if kind == "freed":
        return (
            f"{earlier} was pending when the block was freed, and {later} re-used it: "
            f"no record_stream({first.stream}), no reference kept until then, and no wait between them"
        )
    if second.stream == "host":
        return f"{earlier} must come before {later}: the host did not wait for it"
    return f"{earlier} must come before {later}: no wait_stream or event between them"


def _described(access: HazardAccess, resource: str = "") -> str:
    """Without its operation and line where the resource is named by the same ones."""
    operation = f"{access.op}{_at(access.site)}"
    where = "" if access.write and resource == f"result of {operation}" else f" ({operation})"
    return f"{accessor(access.stream)}'s {'write' if access.write else 'read'}{where}"


def accessor(stream: str) -> str:
    """The host, or the stream of that name; a stream without a name of its own is called ``stream 1``."""
    if stream == "host":
        return "the host"
    return stream if stream.startswith("stream ") else f"the {stream} stream"


def _at(site: SitePart | None) -> str:
    return f" at {site.file}:{site.line}" if site else ""
