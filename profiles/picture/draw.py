"""The picture of a recorded timeline: which steps represent it, and what happened in them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple, get_args

from ...sched.observe import SLEEP, StepInfo, StreamName
from ..measure.steps import PARTS, TimelineError
from ..measure.waiting import IdlePiece, WaitingSink
from ..record.recording import RecordedTimeline
from ..record.timeline import NO_SITE, Call, Op, Wait
from .model import HOST, IDLE, KINDS, Arrow, Boundary, Kind, Lane, Picture, Scene, Slice

IN_A_ROW: Final = 3
_FINEST: Final = 1500  # operations shorter than this part of a scene are drawn together with their neighbours
_PROMPTS: Final = ("prefill", "mixed")
_STREAMS: Final = get_args(StreamName)


class TimelineView:
    """The records of one rank's timeline, sorted, and what follows from them."""

    def __init__(self, timeline: RecordedTimeline) -> None:
        self.streams, self._sites, self.kv = timeline.streams, timeline.sites, timeline.kv
        windows = timeline.windows
        self.ops = sorted(chain.from_iterable(window.ops for window in windows), key=lambda op: op.end)
        self.calls = list(chain.from_iterable(window.calls for window in windows))
        self.ranges = list(chain.from_iterable(window.ranges for window in windows))
        self.waits = list(chain.from_iterable(window.waits for window in windows))
        steps = (info for window in windows for info in (*window.launched, *window.settled))
        self.steps = {info.step: info for info in steps}
        self.idle: list[IdlePiece] = []
        sink = WaitingSink(self.idle.append)
        with suppress(TimelineError):  # of a capture whose steps are out of order: the idle time until there
            for window in windows:
                sink.feed(window)
            sink.finish()

    @cached_property
    def forwards(self) -> dict[int, tuple[int, int]]:
        """First start and last end of each step's forward kernels."""
        spans: dict[int, tuple[int, int]] = {}
        for op in self.ops:
            if op.forward and op.kind == "kernel" and op.step in self.steps:
                low, high = spans.get(op.step, (op.start, op.end))
                spans[op.step] = min(low, op.start), max(high, op.end)
        return spans

    @cached_property
    def _by_stream(self) -> dict[int, tuple[list[int], list[Op]]]:
        found: dict[int, tuple[list[int], list[Op]]] = {}
        for op in self.ops:
            ends, ops = found.setdefault(op.stream, ([], []))
            ends.append(op.end)
            ops.append(op)
        return found

    def last_ended(self, streams: Iterable[int], by: int) -> Op | None:
        """The operation of ``streams`` that ended last, not after ``by``."""
        found = []
        for ends, ops in (self._by_stream[stream] for stream in streams if stream in self._by_stream):
            if at := bisect_right(ends, by):
                found.append(ops[at - 1])
        return max(found, key=lambda op: op.end, default=None)

    def awaited(self, wait: Call | Wait) -> Op | None:
        """What a call or a stream waited for: a call for its own stream, a stream for an event of another one. None of
        a call that waits for another rank."""
        others = self._by_stream.keys()
        if isinstance(wait, Wait):
            return self.last_ended(others - {wait.stream}, wait.end)
        if wait.kind == "link":
            return None
        return self.last_ended([wait.stream] if wait.stream in others else others, wait.end)

    def line(self, site: int) -> tuple[str, str]:
        """FILE:LINE and the statement; empty where no line is known."""
        if site == NO_SITE or site >= len(self._sites):
            return "", ""
        found = self._sites[site]
        return f"{found.file}:{found.line}", found.statement

    def name(self, stream: int) -> str:
        return self.streams.get(stream, f"stream {stream}")


def picture(timelines: Mapping[str, RecordedTimeline]) -> Picture:
    """Scenes of a run, whose ranks have one clock."""
    return pictures({"": timelines})


def pictures(sides: Mapping[str, Mapping[str, RecordedTimeline]]) -> Picture:
    """Scenes of several runs, in which steps of the same kind are above each other. The steps of a run are those of its
    first rank that has them."""
    found: dict[str, list[Excerpt]] = {}
    for side, timelines in sides.items():
        names = {rank: f"{side} {rank if len(timelines) > 1 else ''}".strip() for rank in timelines}
        views = {names[rank]: TimelineView(timeline) for rank, timeline in timelines.items()}
        chosen: dict[bool, tuple[TimelineView, Sequence[StepInfo]]] = {}
        for view in views.values():
            known = [info for step, info in sorted(view.steps.items()) if step in view.forwards]
            for steps in representative(known):
                chosen.setdefault(steps[0].kind in _PROMPTS, (view, steps))
        for view, steps in chosen.values():
            found.setdefault(steps[0].kind, []).append(_excerpt(side, views, view, steps))
    return tuple(map(_scene, found.values()))


def representative(steps: Sequence[StepInfo]) -> Iterator[Sequence[StepInfo]]:
    """Consecutive steps from the middle of the run: of the most frequent kind, steady if possible; and one step with
    prompts."""
    steps = [info for info in steps if info.kind not in PARTS]
    prompts = [info for info in steps if info.kind in _PROMPTS]
    others = Counter(info.kind for info in steps if info.kind not in _PROMPTS)
    if others:
        kind = others.most_common(1)[0][0]
        rows = [steps[at : at + IN_A_ROW] for at in range(len(steps))]
        alike = [row for row in rows if all(info.kind == kind for info in row)]
        best = max((len(row), sum(info.steady for info in row)) for row in alike)
        fitting = [row for row in alike if (len(row), sum(info.steady for info in row)) == best]
        yield fitting[len(fitting) // 2]
    if prompts:
        yield [prompts[len(prompts) // 2]]


class Excerpt(NamedTuple):
    """The part of a run that a scene shows. ``first``: the first forward kernel of its first step. ``zero``: the
    instant from which the scene counts."""

    title: str
    ranks: Mapping[str, TimelineView]
    start: int
    first: int
    end: int
    zero: int = 0

    def take(self, piece: Slice) -> Slice | None:
        """The part of ``piece`` inside, as the scene counts."""
        start, end = max(piece.start, self.start), min(piece.end, self.end)
        return piece._replace(start=start - self.zero, end=end - self.zero) if start < end else None


def _excerpt(
    side: str, ranks: Mapping[str, TimelineView], chosen: TimelineView, steps: Sequence[StepInfo]
) -> Excerpt:
    """From the first host work for ``steps`` of one rank to the end of their last forward."""
    numbers = {info.step for info in steps}
    starts, ends = zip(*(chosen.forwards[step] for step in numbers), strict=True)
    begun = [span.start for span in chosen.ranges if span.step in numbers and span.name != "settle"]
    kind = steps[0].kind + (" (steady)" if all(info.steady for info in steps) else "")
    which = f"step {steps[0].step}" if len(steps) == 1 else f"steps {steps[0].step} to {steps[-1].step}"
    title = f"{side}: {kind}, {which}".removeprefix(": ")
    return Excerpt(title, ranks, min([*begun, *starts]), chosen.forwards[steps[0].step][0], max(ends))


def _scene(parts: Sequence[Excerpt]) -> Scene:
    """The excerpts below each other, aligned at the first forward of each."""
    lead = max(part.first - part.start for part in parts)
    lanes, arrows, boundaries = list[Lane](), list[Arrow](), list[Boundary]()
    for part in (each._replace(zero=each.first - lead) for each in parts):
        for group, view in part.ranks.items():
            lanes += _lanes(group, view, part)
            arrows += _arrows(group, view, part)
            boundaries += [
                Boundary(group, start - part.zero, step)
                for step, (start, _) in sorted(view.forwards.items())
                if part.start < start < part.end
            ]
    labels = {lane.label for lane in lanes}
    shown = (arrow for arrow in arrows if arrow.source in labels | {""} and arrow.target in labels)
    title, end = "; ".join(part.title for part in parts), max(part.end - part.first for part in parts) + lead
    return Scene(title, end, tuple(lanes), tuple(shown), tuple(boundaries))


def _lanes(group: str, view: TimelineView, part: Excerpt) -> Iterator[Lane]:
    """The host, each stream, and the idle time; those without anything in the scene are left out."""
    slices: dict[str, list[Slice]] = {HOST: [*_host(view)]}
    for stream in sorted(view.streams, key=lambda stream: _place(view.name(stream))):
        slices[view.name(stream)] = []
    for op in view.ops:
        kind: Kind = "kernel" if op.kind == "kernel" else "copy"
        name = f"{op.kernels} kernels" if op.kernels > 1 else op.name
        slices.setdefault(view.name(op.stream), []).append(
            Slice(kind, name, op.start, op.end, op.step, *view.line(op.site))
        )
    for wait in view.waits:
        held = Slice("held", "waits for an event", wait.start, wait.end, wait.step)
        slices.setdefault(view.name(wait.stream), []).append(held)
    slices[IDLE] = [
        Slice(piece.cause, KINDS[piece.cause].removeprefix("idle: "), piece.start, piece.end, piece.step)
        for piece in view.idle
    ]
    for name, found in slices.items():
        inside = sorted(filter(None, map(part.take, found)), key=lambda piece: piece.start)
        if inside:
            yield Lane(group, name, tuple(_together(inside, (part.end - part.start) // _FINEST)))


def _place(name: str) -> tuple[int, str]:
    return (_STREAMS.index(name) if name in _STREAMS else len(_STREAMS), name)


def _host(view: TimelineView) -> Iterator[Slice]:
    """The outer ranges, and over them the waits."""
    reached = -1
    for span in sorted(view.ranges, key=lambda span: (span.start, -span.end)):
        if span.end > reached and span.name != SLEEP:
            yield Slice("phase", span.name, max(span.start, reached), span.end, span.step)
        reached = max(reached, span.end)
    for call in view.calls:
        if call.waited:
            yield Slice(
                "stall", call.name, call.end - call.waited, call.end, call.step, *view.line(call.site)
            )


def _together(slices: Sequence[Slice], finest: int) -> Iterator[Slice]:
    """Short neighbours of one kind as one, so that thousands of kernels stay a picture."""
    run = list[Slice]()
    for piece in slices:
        alike = run and piece.kind in ("kernel", "copy") and piece.kind == run[0].kind
        if alike and piece.step == run[0].step and piece.end - run[0].start < finest:
            run.append(piece)
        else:
            yield from _joined(run)
            run = [piece]
    yield from _joined(run)


def _joined(run: Sequence[Slice]) -> Iterator[Slice]:
    if run:
        first, name = run[0], run[0].name if len(run) == 1 else f"{run[0].name} and {len(run) - 1} more"
        yield first._replace(name=name, end=max(piece.end for piece in run))


def _arrows(group: str, view: TimelineView, part: Excerpt) -> Iterator[Arrow]:
    """The waits that end in the scene, each from what it waited for."""
    for wait in chain[Call | Wait]((call for call in view.calls if call.waited), view.waits):
        if not part.start <= wait.end <= part.end:
            continue
        lane, waited, line = view.name(wait.stream), wait.end - wait.start, ("", "")
        if isinstance(wait, Call):
            lane, waited, line = HOST, wait.waited, view.line(wait.site)
        op, target, end = view.awaited(wait), f"{group} {lane}".strip(), wait.end - part.zero
        if isinstance(wait, Call) and wait.kind == "link":
            yield Arrow("", end - waited, target, end, waited, wait.name, *line)
        elif op is not None and op.end >= part.start:
            source = f"{group} {view.name(op.stream)}".strip()
            yield Arrow(source, op.end - part.zero, target, end, waited, op.name, *line)
