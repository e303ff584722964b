"""What a piece of memory has seen: a short window of accesses, each with its place in the order of things."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet, ref

from ...record.timeline import NO_SITE
from .clocks import Clock
from .footprints import ByteSpan, Footprint, Scattered, meet

if TYPE_CHECKING:
    from .blocks import Block
    from .pools import Pool

WINDOW = 16  # accesses of a kind, after which those that everybody knows are dropped


class Owner(NamedTuple):
    """Whose memory it is: a name that somebody gave it, or the operation that made it."""

    name: str
    op: str
    site: int


UNKNOWN = Owner("", "", NO_SITE)  # nobody has written it yet


@dataclass(slots=True, eq=False)
class IssuedOp:
    """An operation in the order of its actor. ``clock`` is the actor's own. A standing one is renewed: it stands for
    the last of many alike."""

    actor: int
    seq: int
    clock: Clock
    op: str
    site: int
    standing: bool = False

    def renew(self, other: IssuedOp) -> None:
        self.seq, self.site = other.seq, other.site


class Entry(NamedTuple):
    """An access. ``freed`` is set where it was made by whoever had the block before."""

    launch: IssuedOp
    footprint: Footprint
    write: bool
    freed: Owner | None = None


class Lane:
    """One actor's accesses of a kind, by footprint: the last of each. Several storages may have one in common."""

    __slots__ = ("_last", "_standing", "actor", "entries")

    def __init__(self, actor: int) -> None:
        self.actor = actor
        self.entries: dict[tuple[Footprint, bool], Entry] = {}  # by footprint, and whether it stands for many
        self._last = 0
        self._standing: IssuedOp | None = None

    @property
    def last(self) -> int:
        """Number of the latest launch among them, or a later one."""
        return self._last if self._standing is None else max(self._last, self._standing.seq)

    def add(self, entry: Entry) -> None:
        self.entries[entry.footprint, entry.launch.standing] = entry
        if entry.launch.standing:
            self._standing = entry.launch
        else:
            self._last = max(self._last, entry.launch.seq)

    def prune(self, known: int) -> None:
        for key, (launch, *_) in list(self.entries.items()):
            if launch.seq <= known and not launch.standing:
                del self.entries[key]


# By actor; common lanes by themselves.
Lanes = dict[int | Lane, Lane]


class Shadow:
    """Accesses to one storage, and the footprints that follow from its values."""

    __slots__ = (
        "__weakref__",
        "block",
        "borrowers",
        "changes",
        "common",
        "epoch",
        "limit",
        "owner",
        "pinned",
        "pool",
        "private",
        "reads",
        "size",
        "writes",
    )

    def __init__(self, owner: Owner, size: int, *, pinned: bool = False) -> None:
        self.owner = owner
        self.size = size  # bytes
        self.pinned = pinned
        self.epoch = 0  # how often it was written
        self.changes = 0  # how often its own lanes were added to
        self.common: set[int] = set()  # actors of lanes that it has in common with others
        self.reads: Lanes = {}
        self.writes: Lanes = {}
        self.borrowers: WeakSet[Scattered] | None = None
        self.block: ref[Block] | None = None
        self.private = False  # a graph's own memory
        self.pool: Pool | None = None  # where somebody gave it a name
        self.limit = WINDOW

    @property
    def out_of_reach(self) -> bool:
        """Whether only the graph that allocated it can still touch it."""
        return self.private and self.block is not None and self.block() is None

    def lend(self, footprint: Scattered) -> None:
        """``footprint`` follows from the values here."""
        if self.borrowers is None:
            self.borrowers = WeakSet()
        self.borrowers.add(footprint)

    def freeze(self) -> None:
        """The values are about to change: whoever borrowed them keeps what they are now."""
        self.epoch += 1
        if self.borrowers:
            for footprint in list(self.borrowers):
                footprint.freeze()
            self.borrowers.clear()

    def unordered(self, launch: IssuedOp, footprint: Footprint, *, write: bool) -> list[Entry]:
        """Earlier accesses that conflict with this one and that nothing puts before it. An actor's own clock has all
        of its own launches."""
        races = _racing(self.writes, launch, footprint)
        return races + _racing(self.reads, launch, footprint) if write else races

    def pending(self, clock: Clock) -> list[Entry]:
        """Accesses that the clock's owner does not know of."""
        return [
            entry
            for lanes in (self.writes, self.reads)
            for lane in lanes.values()
            if lane.last > clock[lane.actor]
            for entry in lane.entries.values()
            if entry.launch.seq > clock[lane.actor]
        ]

    def add(self, launch: IssuedOp, footprint: Footprint, *, write: bool) -> bool:
        """An access that has been compared with those before it; whether it is time to prune. A write to all of
        it stands for them."""
        lanes = self.writes if write else self.reads
        self.changes += 1
        if write and type(footprint) is ByteSpan and footprint.end - footprint.start >= self.size:
            self.reads.clear()
            lanes.clear()
        lane = lanes.get(launch.actor)
        if lane is None:
            lane = lanes[launch.actor] = Lane(launch.actor)
        lane.add(Entry(launch, footprint, write))
        return len(lane.entries) > self.limit

    def inherit(self, entries: Iterable[Entry]) -> None:
        """The block's accesses from before it was freed."""
        for entry in entries:
            lanes, actor = self.writes if entry.write else self.reads, entry.launch.actor
            lanes.setdefault(actor, Lane(actor)).add(entry)

    def settled(self, launch: IssuedOp, *, write: bool) -> bool:
        """Whether all that the launch could conflict with comes before it, wherever it touches."""
        clock = launch.clock
        kinds = (self.writes, self.reads) if write else (self.writes,)
        return all(lane.last <= clock[lane.actor] for lanes in kinds for lane in lanes.values())

    def share(self, lane: Lane, *, write: bool) -> None:
        """Have the lane in common with other storages."""
        (self.writes if write else self.reads)[lane] = lane
        self.common.add(lane.actor)

    def prune(self, known: Clock) -> None:
        """Drop what every later operation comes after."""
        lanes = [*self.reads.values(), *self.writes.values()]
        for lane in lanes:
            lane.prune(known[lane.actor])
        self.limit = 2 * max(len(lane.entries) for lane in lanes) + WINDOW


def _racing(lanes: Lanes, launch: IssuedOp, footprint: Footprint) -> list[Entry]:
    clock, races = launch.clock, []
    for lane in lanes.values():
        known = clock[lane.actor]
        if lane.last > known:
            races += [
                e for e in lane.entries.values() if e.launch.seq > known and meet(e.footprint, footprint)
            ]
    return races
