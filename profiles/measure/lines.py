"""Copies and waiting calls by source line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from ..record.timeline import Call, Op

KERNEL_COPY = "kernel"  # direction of a kernel that reads or writes pinned host memory

_launched = attrgetter("launched")
_start = attrgetter("start")


class CopyLine(NamedTuple):
    """Copies that are alike. ``kind`` is the step's kind, ``decode.steady`` apart from ``decode``."""

    site: int
    range: str
    kind: str
    stream: int
    direction: str
    host_memory: str
    blocking: bool


class CallLine(NamedTuple):
    """Syncs, and other calls that waited, that are alike."""

    site: int
    range: str
    kind: str
    stream: int
    call: str
    sync: bool  # its purpose is to wait


@dataclass(slots=True)
class Cost:
    """``host_ns``: how long calls of the line waited for the device; ``exposed_ns``: its exposed part."""

    count: int = 0
    bytes: int = 0
    host_ns: int = 0
    exposed_ns: int = 0

    def add(self, other: Cost) -> None:
        self.count += other.count
        self.bytes += other.bytes
        self.host_ns += other.host_ns
        self.exposed_ns += other.exposed_ns


class LineTotals:
    """Sums of copies and calls by ``CopyLine`` and ``CallLine``."""

    def __init__(self, exposed: Callable[[Call], int]) -> None:
        self.copies: dict[CopyLine, Cost] = {}
        self.calls: dict[CallLine, Cost] = {}
        self._exposed = exposed

    def fold(self, kind: str, copies: list[Op], calls: list[Call]) -> None:
        """All copies and all copy, sync and waiting calls of one step."""
        others = {id(call): call for call in calls if call.kind != "copy" or call.waited}
        for op, call in paired(copies, [call for call in calls if call.kind == "copy"]):
            cost = self._copy(kind, op)
            if call is not None:
                self._charge(cost, call)
                others.pop(id(call), None)
        for call in others.values():
            line = CallLine(call.site, call.range, kind, call.stream, call.name, call.kind == "sync")
            cost = self.calls.setdefault(line, Cost())
            cost.count += 1
            self._charge(cost, call)

    def _copy(self, kind: str, op: Op) -> Cost:
        kernel = op.kind == "kernel"
        direction = KERNEL_COPY if kernel else op.kind
        memory = "pinned" if kernel else op.host_memory
        line = CopyLine(op.site, op.range, kind, op.stream, direction, memory, op.blocking)
        cost = self.copies.setdefault(line, Cost())
        cost.count += 1
        cost.bytes += op.host_bytes if kernel else op.bytes
        return cost

    def _charge(self, cost: Cost, call: Call) -> None:
        if call.waited:
            cost.host_ns += call.waited
            cost.exposed_ns += self._exposed(call)


def paired(copies: Iterable[Op], calls: Iterable[Call]) -> Iterator[tuple[Op, Call | None]]:
    """Each copy with the call that enqueued it. A kernel copy and a node of a graph have no call of their own."""
    ordered = iter(sorted(calls, key=_start))
    call = next(ordered, None)
    for op in sorted(copies, key=_launched):
        while call is not None and call.end < op.launched:
            call = next(ordered, None)
        if op.kind == "kernel" or call is None or op.launched < call.start:
            yield op, None
        else:
            yield op, call
            call = next(ordered, None)
