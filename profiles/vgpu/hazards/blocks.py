"""Device memory as the caching allocator hands it out: by stream and pool, freed when the last view dies.

Freeing is an act of the host. A block goes back to the stream that it was allocated on and may be re-issued there
at once, whatever other streams are still doing with it, unless ``record_stream`` named them. What was
pending then is kept and meets the next owner's accesses.

The real allocator splits and joins the blocks of a pool, so that what is freed may become part of the next
allocation of any size in it. Here it always does: where the heap's layout would decide, the worst is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from .clocks import Clock, Clocks
from .footprints import ByteSpan
from .shadows import Entry, Shadow

SMALL = 1 << 20  # bytes; torch keeps a pool for what is no larger


class FreeBlocks:
    """Pending accesses of freed blocks, by stream and whether they are small."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._pending: dict[tuple[int, bool], list[Sequence[Entry]]] = {}

    def take(self, actor: int, size: int) -> Sequence[Entry]:
        """What is pending in the block that is issued on that stream."""
        waiting = self._pending.get((actor, size <= SMALL))
        if not waiting:
            return ()
        clock = self._clocks.of(actor)
        while waiting:
            entries = _unknown(waiting.pop(), clock)
            if entries:
                return [entry._replace(footprint=ByteSpan(0, size)) for entry in entries]
        return ()

    def give(self, actor: int, shadow: Shadow, recorded: set[int]) -> None:
        """The host frees a block of that stream; ``recorded`` streams are waited for."""
        clock = self._clocks.of(actor)
        entries = [
            entry._replace(freed=entry.freed or shadow.owner)
            for entry in shadow.pending(clock)
            if entry.launch.actor != actor and entry.launch.actor not in recorded
        ]
        if entries:
            self._pending.setdefault((actor, shadow.size <= SMALL), []).append(entries)


class Freeing(Protocol):
    def freed(self, block: Block) -> None: ...


class Block:
    """Device memory while somebody can still reach it: its tensor and the views of it share one."""

    __slots__ = ("__weakref__", "_allocator", "actor", "recorded", "shadow")

    def __init__(self, shadow: Shadow, actor: int, allocator: Freeing) -> None:
        self.shadow = shadow
        self.actor = actor  # the stream it was allocated on
        self.recorded: set[int] = set()
        self._allocator = allocator

    def __del__(self) -> None:
        self._allocator.freed(self)


def _unknown(entries: Iterable[Entry], clock: Clock) -> list[Entry]:
    return [entry for entry in entries if entry.launch.seq > clock[entry.launch.actor]]
