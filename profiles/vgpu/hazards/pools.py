"""Memory that steps share, by name: what is written there is meant to be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...record.hazards import FoundHazard
from ...record.timeline import Site
from .findings import told, touched
from .shadows import IssuedOp


@dataclass(slots=True, eq=False)
class Pool:
    """What happened to a named tensor since it was named."""

    name: str
    writes: int = 0
    last: IssuedOp | None = None
    is_read: bool = False

    def note(self, launch: IssuedOp, *, write: bool) -> None:
        if write:
            self.writes += 1
            self.last = launch
        else:
            self.is_read = True


def unread(
    pools: Iterable[Pool], sites: Sequence[Site], streams: Mapping[int, str]
) -> tuple[FoundHazard, ...]:
    """Pools that were written and never read."""
    return tuple(
        _finding(pool, pool.last, sites, streams)
        for pool in pools
        if pool.last is not None and not pool.is_read
    )


def _finding(pool: Pool, last: IssuedOp, sites: Sequence[Site], streams: Mapping[int, str]) -> FoundHazard:
    touch = touched(last, sites, streams, write=True)
    return FoundHazard(
        "unread",
        pool.name,
        touch,
        None,
        f"{told(touch)}, the last of {pool.writes} writes: nobody ever reads {pool.name}",
    )
