"""Shadow memory: the recent accesses to each storage, with their places in the order of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ref

from ...record.timeline import NO_SITE
from .clocks import Clock
from .footprints import ByteSpan, Footprint, Scattered, ValueSource, meet


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
        """Represent ``other``, the latest of the equal operations."""
        self.seq, self.site = other.seq, other.site


class MemoryAccess(NamedTuple):
    """``freed_origin`` is the memory's origin if the access was made before the block was freed and issued again; it
    races with nothing if ``kept_by`` is the place of a record_stream for its stream."""

    launch: IssuedOp
    footprint: Footprint
    write: bool
    freed_origin: MemoryOrigin | None = None
    kept_by: int | None = None


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


WINDOW = 16  # accesses of one kind, after which those that every later operation comes after are dropped


class AccessHistory:
    """One actor's reads or writes: the latest for each footprint. Several storages may share one history."""

    __slots__ = ("_last", "accesses", "actor", "others", "write")

    def __init__(self, actor: int, *, write: bool) -> None:
        self.actor = actor
        self.write = write
        self.accesses: dict[Footprint, IssuedOp] = {}
        # That of each recurring launch, which touches a storage in one way; and, by whether its launch is recurring,
        # the last one before the block was freed.
        self.others: dict[IssuedOp | bool, MemoryAccess] = {}
        self._last = 0  # an upper bound of the numbers of the launches in ``accesses``

    def after(self, known: int) -> bool:
        """Whether there may be a launch whose number is above ``known``."""
        others = self.others  # mostly none
        return self._last > known or (bool(others) and any(a.launch.seq > known for a in others.values()))

    def since(self, known: int) -> list[MemoryAccess]:
        """The accesses whose launches have numbers above ``known``."""
        others = [access for access in self.others.values() if access.launch.seq > known]
        return [
            *(access for access in others if access.freed_origin),
            *(MemoryAccess(op, part, self.write) for part, op in self.accesses.items() if op.seq > known),
            *(access for access in others if not access.freed_origin),
        ]

    def add(self, launch: IssuedOp, footprint: Footprint) -> None:
        if self.others and any(
            old.freed_origin and old.footprint == footprint for old in self.others.values()
        ):
            self.others.pop(launch.recurring, None)
        if launch.recurring:
            self.others[launch] = MemoryAccess(launch, footprint, self.write)
            return
        self.accesses[footprint] = launch
        if launch.seq > self._last:
            self._last = launch.seq

    def prune(self, known: int) -> None:
        for footprint in [footprint for footprint, launch in self.accesses.items() if launch.seq <= known]:
            del self.accesses[footprint]
        if False in self.others and self.others[False].launch.seq <= known:
            del self.others[False]


# By actor; a shared history is its own key.
Histories = dict[int | AccessHistory, AccessHistory]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Block:
    """Device memory for as long as it is reachable: its tensor and all views of it share one block."""

    shadow: ShadowMemory
    actor: int  # the stream it was allocated on
    on_free: Callable[[Block], None]
    # The streams that record_stream named, each with the place of the call.
    recorded: dict[int, int] = field(default_factory=dict)

    def __del__(self) -> None:
        self.on_free(self)


@dataclass(slots=True, eq=False, weakref_slot=True)
class ShadowMemory:
    """The accesses to one storage, and the footprints that follow from its values."""

    origin: MemoryOrigin
    size: int  # bytes
    pinned: bool = False
    epoch: int = 0  # how often the storage was written, since something follows from its values
    is_followed: bool = False
    # Of each graph that writes the storage, those of its storages that something follows from.
    followed_of_graphs: tuple[set[ShadowMemory], ...] = ()
    # One set for each group of a graph's storages that need not compare this one: the storages that it has to compare.
    settled_groups: tuple[set[ShadowMemory], ...] = ()
    # A bit for each actor whose next read, or next access of any kind, needs no comparison.
    ordered_reads: int = -1
    ordered: int = -1
    sharing: frozenset[int] = frozenset()  # actors whose history is shared with other storages
    reads: Histories = field(default_factory=dict)
    writes: Histories = field(default_factory=dict)
    # The last write to all of the storage, which came before everything in the histories.
    whole_write: IssuedOp | None = None
    # Not a WeakSet, whose methods cost more than all else here; those that are gone are dropped now and then.
    dependents: tuple[ref[ValueSource], ...] = ()
    # What determined the footprint of the last access by indices, and the footprint.
    indexed: tuple[object, Scattered | None] = (None, None)
    inherits_recurring: bool = False
    block: ref[Block] | None = None
    private: bool = False  # whether it is a graph's own memory
    named: NamedMemory | None = None  # None unless the program has named it
    limit: int = WINDOW

    @property
    def out_of_reach(self) -> bool:
        """Whether only the graph that allocated it can still touch it."""
        return self.private and self.block is not None and self.block() is None

    def follow(self) -> None:
        """Something follows from the present values."""
        self.is_followed = True
        for followed in self.followed_of_graphs:
            followed.add(self)

    def add_dependent(self, source: ref[ValueSource]) -> None:
        """``source`` reads the values of this storage."""
        self.follow()
        self.dependents += (source,)
        if len(self.dependents) % WINDOW == 0:
            self.dependents = tuple(source for source in self.dependents if source() is not None)

    def freeze(self) -> None:
        """The values are about to change: those that footprints follow from are copied."""
        self.epoch += 1
        if self.dependents:
            sources, self.dependents = self.dependents, ()
            for source in sources:
                if (found := source()) is not None:
                    found.freeze()

    def unordered(self, launch: IssuedOp, footprint: Footprint, *, write: bool) -> list[MemoryAccess]:
        """Earlier accesses that conflict with this one and are not ordered before it."""
        return [
            access
            for access in self.after(launch.actor, launch.clock, write=write)
            if access.kept_by is None and meet(access.footprint, footprint)
        ]

    def depending(
        self, launch: IssuedOp, floor: Clock, footprint: Footprint, *, write: bool
    ) -> list[MemoryAccess]:
        """Earlier accesses that conflict with this one and do not race with it because of a record_stream or because of
        an order that the launch's clock has and ``floor``, which is less, has not."""
        clock = launch.clock
        return [
            access
            for access in self.after(launch.actor, floor, write=write)
            if (access.launch.seq <= clock[access.launch.actor]) is (access.kept_by is None)
            and meet(access.footprint, footprint)
        ]

    def after(self, actor: int, clock: Clock, *, write: bool) -> Iterator[MemoryAccess]:
        """Other actors' accesses after the clock, with which a read or a write of the actor may conflict."""
        whole = self.whole_write
        if whole is not None and whole.actor != actor and whole.seq > clock[whole.actor]:
            yield MemoryAccess(whole, ByteSpan(0, self.size), write=True)
        for histories in (self.writes, self.reads) if write else (self.writes,):
            for history in histories.values():
                known = clock[history.actor]
                if history.actor != actor and history.after(known):
                    yield from history.since(known)

    def add(self, launch: IssuedOp, footprint: Footprint, write: bool) -> bool:
        """Add an access that has been compared with those before it; returns whether pruning is due. A write to the
        whole storage replaces all earlier accesses."""
        actor = launch.actor
        bit, histories = 1 << actor, self.reads
        if write:
            if type(footprint) is ByteSpan and footprint[1] - footprint[0] >= self.size:
                if self.settled_groups:
                    self.mark_uncompared()
                self.reads.clear()
                self.writes.clear()
                self.ordered = self.ordered_reads = bit
                self.whole_write = launch
                return False
            self.ordered_reads &= bit
            histories = self.writes
        self.ordered &= bit
        if self.settled_groups and actor not in self.sharing:
            self.mark_uncompared()
        history = histories.get(actor)
        if history is None:
            history = histories[actor] = AccessHistory(actor, write=write)
        history.add(launch, footprint)
        return len(history.accesses) > self.limit

    def inherit(self, accesses: Iterable[MemoryAccess]) -> None:
        """Add the block's accesses from before it was freed."""
        for access in accesses:
            self.ordered = self.ordered_reads = 0
            histories, launch = self.writes if access.write else self.reads, access.launch
            history = histories.setdefault(launch.actor, AccessHistory(launch.actor, write=access.write))
            history.others[launch.recurring] = access
            self.inherits_recurring |= launch.recurring

    def settled(self, actor: int, clock: Clock, *, write: bool) -> bool:
        """Whether everything that the actor's access could conflict with is ordered before the clock, whatever it
        touches. The actor's own accesses are, though a clock without some places may not count the last of them."""
        bit = 1 << actor
        if (self.ordered if write else self.ordered_reads) & bit:
            return True
        whole = self.whole_write
        if whole is not None and whole.actor != actor and whole.seq > clock[whole.actor]:
            return False
        for histories in (self.writes, self.reads) if write else (self.writes,):
            for history in histories.values():
                if history.actor != actor and history.after(clock[history.actor]):
                    return False
        if not self.inherits_recurring:
            self.ordered_reads |= bit
            self.ordered |= bit if write else 0
        return True

    def share(self, history: AccessHistory, *, write: bool) -> None:
        """Add a history that several storages share."""
        self.ordered &= 1 << history.actor
        if write:
            self.ordered_reads &= 1 << history.actor
        (self.writes if write else self.reads)[history] = history

    def settle(self, uncompared: set[ShadowMemory], actor: int, clock: Clock, *, write: bool) -> None:
        """The storage's access by a graph on that actor, which is one of a group of accesses, has been compared. Until
        another access it is none of the ``uncompared`` ones, if another comparison would find nothing."""
        if actor not in self.sharing:
            self.sharing |= {actor}
            self.mark_uncompared()
        if self.settled(actor, clock, write=write) and self.sharing == {actor}:
            uncompared.discard(self)
            self.settled_groups += (uncompared,)

    def mark_uncompared(self) -> None:
        """Groups of a graph's storages have to compare this one at the next replay."""
        for uncompared in self.settled_groups:
            uncompared.add(self)
        self.settled_groups = ()

    def prune(self, known: Clock) -> None:
        """Drop the accesses that every later operation comes after."""
        histories = [*self.reads.values(), *self.writes.values()]
        for history in histories:
            history.prune(known[history.actor])
        self.limit = 2 * max(len(history.accesses) for history in histories) + WINDOW
