"""What of a run can be changed: source lines that copy, sync or launch from the schedule, and host phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..measure.steps import OUTSIDE
from ..platform.hardware import HardwareProfile
from ..record.result import STREAM_WAIT, CopyRow, Result, SitePart, SyncRow
from ..record.timeline import NO_SITE, Names, Window

_LAUNCHES: Final = {"kernel": "launch", "d2d": "d2d"}

LinePlace = tuple[str, int]  # file and line


@dataclass(slots=True, eq=False)
class SourceLine:
    """``waits``: its calls wait for the device; ``orders``: it syncs, or makes a stream wait; ``pinnable``: it copies
    from or to pageable memory, or blocks."""

    site: SitePart
    what: dict[str, None] = field(default_factory=dict)  # in the order in which they were found
    kinds: set[str] = field(default_factory=set)
    waits: bool = False
    orders: bool = False
    pinnable: bool = False
    exposed_us: float = 0.0
    host_us: float = 0.0


class EarlySettles:
    """A sink that counts steps whose settling ended on the host before their forward did on the device."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._settled: dict[int, int] = {}
        self._computed: dict[int, int] = {}

    def feed(self, window: Window) -> None:
        # In the range settle the host reads a step's tokens and gives them out.
        self._settled |= {entry.step: entry.end for entry in window.ranges if entry.name == "settle"}
        for op in window.ops:
            if op.forward and op.kind == "kernel":
                self._computed[op.step] = max(op.end, self._computed.get(op.step, 0))

    def finish(self, names: Names) -> None:
        """Nothing is left to be done."""

    @property
    def count(self) -> int:
        return sum(end < self._computed.get(step, end) for step, end in self._settled.items())


class LineSurvey(EarlySettles):
    """Also notes what the rows of a result do not have: lines that launch, those of graphs, and host phases."""

    def begin(self) -> None:
        super().begin()
        self.ranges: dict[str, int] = {}
        self.launches: dict[SitePart, tuple[set[str], set[str]]] = {}  # what, and kinds of steps
        self.graphs: set[LinePlace] = set()
        self._launched: dict[tuple[int, int], set[str]] = {}
        self._graphs: set[int] = set()
        self._kinds: dict[int, str] = {}

    def feed(self, window: Window) -> None:
        super().feed(window)
        for entry in window.ranges:
            self.ranges[entry.name] = self.ranges.get(entry.name, 0) + entry.end - entry.start
        for op in window.ops:
            if op.kind in _LAUNCHES and op.step >= 0 and op.site != NO_SITE and not op.forward:
                self._launched.setdefault((op.site, op.step), set()).add(_LAUNCHES[op.kind])
        self._graphs |= {call.site for call in window.calls if call.kind == "graph" and call.site != NO_SITE}
        self._kinds |= {info.step: info.kind for info in (*window.launched, *window.settled)}

    def finish(self, names: Names) -> None:
        for (site, step), what in self._launched.items():
            if step in self._kinds:
                part = SitePart(**names.sites[site]._asdict())
                known, kinds = self.launches.setdefault(part, (set(), set()))
                known |= what
                kinds.add(self._kinds[step])
        self.graphs = {(names.sites[site].file, names.sites[site].line) for site in self._graphs}


def source_lines(result: Result, surveys: Sequence[LineSurvey]) -> list[SourceLine]:
    """The lines, those with the most exposed time first, without those that launch graphs: they are the forward."""
    lines: dict[LinePlace, SourceLine] = {}
    for row in _rows(result):
        if row.site is not None:  # else it is a call of schedbench's own, below an engine's
            _take(_line(lines, row.site), row)
    for site, (what, kinds) in (launch for survey in surveys for launch in survey.launches.items()):
        line = _line(lines, site)
        line.what |= dict.fromkeys(sorted(what))
        line.kinds |= kinds
    graphs = {place for survey in surveys for place in survey.graphs}
    found = [line for place, line in lines.items() if place not in graphs]
    return sorted(found, key=lambda line: (-line.exposed_us, -line.host_us, not line.pinnable))


def phases(surveys: Sequence[LineSurvey], hardware: HardwareProfile) -> list[str]:
    """The names of the ranges that the run opened and the profile has a cost of, the longest first, device calls
    included."""
    times = Counter[str]()
    for survey in surveys:
        times.update(survey.ranges)
    return [name for name, _ in times.most_common() if name in hardware.phases]


def _rows(result: Result) -> Iterator[CopyRow | SyncRow]:
    """What lines do to the device in a step. Waits for other ranks' hosts are no calls of the device."""
    yield from (row for row in result.copies if row.kind != OUTSIDE and row.direction != "kernel")
    yield from (row for row in result.syncs if row.kind != OUTSIDE and (row.sync or row.call == STREAM_WAIT))


def _line(lines: dict[LinePlace, SourceLine], site: SitePart) -> SourceLine:
    return lines.setdefault((site.file, site.line), SourceLine(site))


def _take(line: SourceLine, row: CopyRow | SyncRow) -> None:
    line.kinds.add(row.kind)
    line.waits |= row.host_us > 0 or (row.blocking if isinstance(row, CopyRow) else row.sync)
    line.exposed_us += row.exposed_us
    line.host_us += row.host_us
    line.what[row.what] = None
    line.orders |= isinstance(row, SyncRow)
    if isinstance(row, CopyRow):
        line.pinnable |= row.direction in ("h2d", "d2h") and (row.blocking or row.host_memory == "pageable")
