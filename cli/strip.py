"""A picture in a terminal: one row of characters per lane. Long stretches in which nothing begins or ends are cut."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from rich.text import Text

from ..profiles.measure.waiting import CAUSES
from ..profiles.picture.model import HOST, IDLE, KINDS, Arrow, Kind, Lane, Picture, Scene, Slice
from .text import cut_left, cut_right, number

_LONGEST: Final = 7  # a stretch without events takes at most this part of the strip
_WAITS: Final = 3  # that are named below a strip


class Look(NamedTuple):
    """The character and its style in a terminal, and the colour of a chart."""

    sign: str
    style: str
    colour: str


LOOKS: Final[Mapping[Kind, Look]] = {
    "phase": Look("─", "cyan", "#7aa6c2"),
    "stall": Look("░", "red", "#d1495b"),
    "kernel": Look("█", "green", "#4c9f70"),
    "copy": Look("▒", "magenta", "#a06cd5"),
    "held": Look("·", "yellow", "#e0b04b"),
    "exposed_host": Look("w", "blue", "#2f7fb5"),
    "exposed_stall": Look("s", "red", "#d1495b"),
    "launch_latency": Look("l", "magenta", "#b565a7"),
    "dependency": Look("e", "yellow", "#e0b04b"),
    "kernel_gap": Look("g", "white", "#8a8a8a"),
    "no_work": Look("n", "white", "#c4c4c4"),
}


def strips(picture: Picture, width: int) -> Iterator[Text]:
    """The lines of all scenes, none wider than ``width``."""
    for scene in picture:
        yield Text()
        yield from strip(scene, width)
    kinds = {piece.kind for scene in picture for lane in scene.lanes for piece in lane.slices}
    signs = [f"{LOOKS[kind].sign} {name}" for kind, name in KINDS.items() if kind in kinds - {*CAUSES}]
    yield from _wrapped([*signs, "≈ cut"], width)


def strip(scene: Scene, width: int) -> Iterator[Text]:
    label = max(len(lane.label) for lane in scene.lanes) + 2
    axis = _Axis(scene, width - label)
    yield Text(cut_right(f"{scene.title}: {number(scene.end / 1e3)} µs", width), style="bold")
    for lane in scene.lanes:
        yield Text.assemble(lane.label.ljust(label), _row(lane, axis))
        if lane.name == IDLE:
            yield _steps(scene, lane.group, axis, label)
    yield from _idle(scene, width)
    yield from _waits(scene, width)


class _Axis:
    """From instants to columns. Stretches between two events are to scale up to a limit."""

    def __init__(self, scene: Scene, columns: int) -> None:
        slices = [piece for lane in scene.lanes for piece in lane.slices]
        self._at = sorted({0, scene.end, *(at for piece in slices for at in (piece.start, piece.end))})
        lengths = [float(b - a) for a, b in pairwise(self._at)]
        limit = max(lengths)
        for _ in range(20):  # towards the limit that is its own part of the sum
            limit = min(limit, max(sum(min(length, limit) for length in lengths) / _LONGEST, 1))
        kept = [min(length, limit) for length in lengths]
        scale = columns / sum(kept)
        self._columns = [0.0]
        for length in kept:
            self._columns.append(self._columns[-1] + length * scale)
        self.columns = columns
        self.cut = [
            round((a + b) / 2) for n, (a, b) in enumerate(pairwise(self._columns)) if lengths[n] > kept[n]
        ]

    def column(self, at: int) -> float:
        n = min(bisect_right(self._at, at) - 1, len(self._at) - 2)
        low, high = self._columns[n], self._columns[n + 1]
        return low + (high - low) * (at - self._at[n]) / (self._at[n + 1] - self._at[n])


def _row(lane: Lane, axis: _Axis) -> Text:
    """Each cell shows what took most of it; a stall hides the phase that it interrupts."""
    cells: list[tuple[float, Slice] | None] = [None] * axis.columns
    for piece in lane.slices:
        low, high = axis.column(piece.start), axis.column(piece.end)
        for at in range(int(low), min(int(high) + 1, axis.columns)):
            share = min(high, at + 1) - max(low, at)
            found = cells[at]
            if found is None or share > found[0] or (piece.kind == "stall" and share > 0.5):
                cells[at] = (share, piece)
    row, begin = Text(), 0
    for at, cell in enumerate(cells):
        if cell is None:
            row.append(" ")
            continue
        before = cells[at - 1] if at else None
        if before is None or before[1] is not cell[1]:
            begin = at
        piece, place, look = cell[1], at - begin, LOOKS[cell[1].kind]
        named = piece.kind == "phase" and place < len(piece.name)  # a phase begins with its name
        row.append(piece.name[place] if named else look.sign, look.style)
    return row


def _steps(scene: Scene, group: str, axis: _Axis, label: int) -> Text:
    """The first forward kernel of each step."""
    row = [" "] * axis.columns
    for at in axis.cut:
        row[min(at, axis.columns - 1)] = "≈"
    for boundary in scene.boundaries:
        if boundary.group == group:
            mark = f"╰{boundary.step}"
            at = min(int(axis.column(boundary.at)), axis.columns - len(mark))
            row[at : at + len(mark)] = mark
    return Text("step".ljust(label) + "".join(row), style="dim")


def _idle(scene: Scene, width: int) -> Iterator[Text]:
    """The idle time of each lane by its cause."""
    for lane in scene.lanes:
        if lane.name == IDLE:
            totals: Counter[Kind] = Counter()
            for piece in lane.slices:
                totals[piece.kind] += piece.end - piece.start
            parts = [
                f"{LOOKS[kind].sign} {KINDS[kind].removeprefix('idle: ')} {number(time / 1e3)} µs"
                for kind, time in totals.most_common()
            ]
            yield from _wrapped([f"{lane.label}: {parts[0]}", *parts[1:]], width)


def _waits(scene: Scene, width: int) -> Iterator[Text]:
    """What the host waited for, longest first."""
    found = defaultdict[tuple[str, str, str, str], list[Arrow]](list)
    for arrow in scene.arrows:
        if arrow.target.endswith(HOST):
            what = f"for {arrow.source}: " if arrow.source else f"to {arrow.name}"
            found[arrow.target, what, arrow.line, arrow.statement].append(arrow)
    rows = sorted(found.items(), key=lambda row: -sum(arrow.waited for arrow in row[1]))
    for (target, what, line, statement), arrows in rows[:_WAITS]:
        total = number(sum(arrow.waited for arrow in arrows) / 1e3)
        times = "" if len(arrows) == 1 else f" in {len(arrows)} waits"
        name = arrows[0].name if arrows[0].source else ""
        yield Text(cut_right(f"{target} waited {total} µs{times} {what}{name}", width))
        if line:
            yield Text(cut_right(f"    {cut_left(line, width - 4)}  {statement}", width), style="dim")
    if len(rows) > _WAITS:
        yield Text(f"and {len(rows) - _WAITS} more that waited", style="dim")


def _wrapped(parts: list[str], width: int) -> Iterator[Text]:
    line = ""
    for part in parts:
        if line and len(line) + len(part) + 3 > width:
            yield Text(line, style="dim")
            line = ""
        line += f"{'   ' if line else ''}{part}"
    yield Text(line, style="dim")
