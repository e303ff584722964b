"""The records of the hazard checker: operations, their accesses, and where memory comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...record.timeline import NO_SITE
from .clocks import Clock
from .footprints import Footprint


class MemoryOrigin(NamedTuple):
    """How reports call a piece of memory: by the name that the program gave it, else by the operation that wrote it
    first."""

    name: str
    op: str
    site: int


UNWRITTEN = MemoryOrigin("", "", NO_SITE)


@dataclass(slots=True, eq=False)
class IssuedOp:
    """An operation in the order of its actor, which is the host or a stream. ``clock`` is the actor's own clock, not a
    copy. A ``recurring`` one represents the latest of many equal operations and is renewed for each."""

    actor: int
    seq: int
    clock: Clock
    op: str
    site: int
    recurring: bool = False

    def renew(self, other: IssuedOp) -> None:
        self.seq, self.site = other.seq, other.site


class MemoryAccess(NamedTuple):
    """``freed`` is the memory's origin if the access was made before the block was freed and issued again."""

    launch: IssuedOp
    footprint: Footprint
    write: bool
    freed: MemoryOrigin | None = None


@dataclass(slots=True, eq=False)
class NamedMemory:
    """What happened to memory since the program named it. Steps share such memory, so each write should be read."""

    name: str
    writes: int = 0
    last_write: IssuedOp | None = None
    is_read: bool = False

    def note(self, launch: IssuedOp, *, write: bool) -> None:
        if write:
            self.writes += 1
            self.last_write = launch
        else:
            self.is_read = True
