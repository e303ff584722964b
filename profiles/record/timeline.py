"""The records of what happened in a run, for all sources: the virtual GPU, Kineto, Nsight Systems.

All instants are integer nanoseconds on one clock. Records refer to ranges by name and step, to source lines by
an index into ``Timeline.sites``, to streams by a small integer named in ``Timeline.streams``.

A timeline is delivered as windows in time order. A window holds every record that *ended* in [start, end) of the
window; whatever is still under way comes in a later one. A short run is a single window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

from ...sched.observe import StepInfo

OpKind = Literal["kernel", "h2d", "d2h", "d2d", "memset", "send"]
CallKind = Literal["sync", "copy", "launch", "event", "graph", "link"]
HostMemory = Literal["pinned", "pageable", ""]

Record = TypeVar("Record", bound="Range | Op | Call")

NO_SITE = -1


class Site(NamedTuple):
    """A source line of the scheduler. Matched between refs by file, function and statement; lines move."""

    file: str
    function: str
    line: int
    statement: str


class Range(NamedTuple):
    """A named piece of host work. ``step`` is the step that it belongs to."""

    name: str
    step: int
    size: int
    start: int
    end: int


class Op(NamedTuple):
    """Something the device executed."""

    kind: OpKind
    name: str
    stream: int
    start: int
    end: int
    bytes: int  # copied, for copies; 0 for kernels
    host_bytes: int  # pinned host memory touched by a kernel ("kernel copy"); 0 otherwise
    host_memory: HostMemory
    blocking: bool  # the host waited for it
    range: str  # innermost open range, "" if none
    forward: bool  # opened inside a range of category forward
    step: int
    site: int
    launched: int  # when the host enqueued it
    kernels: int = 1  # kernels in it: more than one for what a replayed graph ran without a break


class Call(NamedTuple):
    """A host call into the device's API. ``waited`` of its duration was spent waiting for the device."""

    kind: CallKind
    name: str
    start: int
    end: int
    waited: int  # ns, at the end of the call
    stream: int
    range: str
    step: int
    site: int


class Wait(NamedTuple):
    """A stream held by an event of another stream: work behind it was enqueued but could not start."""

    stream: int
    start: int
    end: int
    step: int


@dataclass(slots=True)
class Records(Sequence[Record]):
    """Records that are made when they are read. ``columns`` has the fields of all of them: it is a record whose fields
    are tuples with one value per record, which are read in a fraction of the time that records take."""

    columns: Any

    @staticmethod
    def of(kind: type[Record], rows: Sequence[Record] | Sequence[tuple[Any, ...]]) -> Records[Record]:
        """``rows`` are records of that kind, or tuples with their fields."""
        if isinstance(rows, Records):
            return rows
        columns: Any = [*zip(*rows, strict=True)] or ((),) * len(kind._fields)
        return Records(kind._make(columns))

    def at(self, places: Sequence[int]) -> Sequence[Record]:
        """The records at those places."""
        if not places:
            return []
        chosen = map(itemgetter(*places, places[0]), self.columns)  # of one place it would get no tuple
        make: Any = tuple.__new__  # in half of the time of ``_make``
        return [*map(make, repeat(type(self.columns), len(places)), zip(*chosen, strict=True))]

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[Record]:
        return map(self.columns._make, zip(*self.columns, strict=True))

    @overload
    def __getitem__(self, at: int) -> Record: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Record]: ...
    def __getitem__(self, at: int | slice) -> Record | Sequence[Record]:
        return [*self][at]


@dataclass(slots=True)
class Window:
    start: int
    end: int
    ranges: Sequence[Range] = field(default_factory=list)
    ops: Sequence[Op] = field(default_factory=list)
    calls: Sequence[Call] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    launched: list[StepInfo] = field(default_factory=list)  # steps whose forward was enqueued
    settled: list[StepInfo] = field(default_factory=list)


class Sink(Protocol):
    """Takes windows in time order; metrics, traces and reports are sinks."""

    def feed(self, window: Window) -> None: ...


class Names(Protocol):
    """Resolves the small integers of records once a run is over."""

    @property
    def sites(self) -> Sequence[Site]: ...

    @property
    def streams(self) -> dict[int, str]: ...


HazardKind = Literal["race", "pinned", "freed", "unread"]
OrderKind = Literal["wait", "event", "reference"]
