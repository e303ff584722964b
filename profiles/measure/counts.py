"""Copies, syncs and kernels of a step: by step kind and stream, in total and by source line, as rows of the result."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from statistics import median
from typing import Any, Final, TypeVar

from ...sched.observe import StepInfo
from ..record.result import STREAM_WAIT, CopyRow, CountSummary, KindCounts, SitePart, SyncRow
from ..record.timeline import Call, Names, Op, Records, Window
from .steps import OUTSIDE, StepGate, labels


@dataclass(slots=True)
class Cost:
    """Of copies or calls that are alike. ``steady``: of ``count``, those in steady decodes; ``host_ns``: how long calls
    waited for the device; ``exposed_ns``: its exposed part."""

    count: int = 0
    steady: int = 0
    bytes: int = 0
    host_ns: int = 0
    exposed_ns: int = 0


Costs = defaultdict[tuple[Any, ...], Cost]
"""By the fields of a row up to ``count``, but with the numbers of the site and the stream."""

_start = itemgetter(Call._fields.index("start"))
_launched = itemgetter(Op._fields.index("launched"))

COUNTS_LAG: Final = 8  # more than WAITING_LAG, since the exposed parts must be there when a step is folded
_COPIES: Final = frozenset(("h2d", "d2h", "d2d"))
# Calls of these kinds and stream waits always count; other calls count where the host waited in them.
_COUNTED: Final = frozenset(("sync", "copy"))


@dataclass(slots=True)
class _Pending:
    """Records of a step that is not complete yet. ``counts`` is by stream and counter."""

    counts: defaultdict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    copies: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


class CountsSink:
    """Folds windows into counts per step, and into sums by source line: ``copies``, and ``calls`` that are syncs, waits
    of streams, or other calls that the host waited in. Must be fed after the sink that computes ``exposed``."""

    def __init__(self, exposed: Callable[[Call], int]) -> None:
        self.copies, self.calls = Costs(Cost), Costs(Cost)
        self._exposed = exposed
        self.steps: Counter[str] = Counter()
        self._gate = StepGate(COUNTS_LAG)
        self._pending: defaultdict[int, _Pending] = defaultdict(_Pending)
        self._outside: deque[tuple[int, _Pending]] = deque()  # folded once the step named has passed
        self._newest = -1
        self._seen: defaultdict[tuple[str, int, str], Counter[int]] = defaultdict(Counter)

    def feed(self, window: Window) -> None:
        """Raises TimelineError if a copy, sync or kernel arrives after its step is complete."""
        pending = self._pending
        ops, calls = Records.of(Op, window.ops), Records.of(Call, window.calls)
        of = ops.columns
        for step, stream, kind, kernels in zip(of.step, of.stream, of.kind, of.kernels, strict=True):
            pending[step].counts[stream, kind] += kernels
        sizes = of.host_bytes
        for op in ops.at([at for at, kind in enumerate(of.kind) if kind in _COPIES or sizes[at]]):
            entry = pending[op.step]
            entry.copies.append(op)
            if op.kind in _COPIES and op.host_memory:
                entry.counts[op.stream, f"{op.kind}_{op.host_memory}"] += 1
            if op.kind in _COPIES and op.blocking:
                entry.counts[op.stream, f"{op.kind}_blocking"] += 1
        waited, names, kinds = calls.columns.waited, calls.columns.name, calls.columns.kind
        counted = [
            kind in _COUNTED or waited[at] or names[at] == STREAM_WAIT for at, kind in enumerate(kinds)
        ]
        for call in calls.at([at for at, counts in enumerate(counted) if counts]):
            entry = pending[call.step]
            entry.calls.append(call)
            if call.kind == "sync":
                entry.counts[call.stream, "sync"] += 1
        self._newest = max((info.step for info in window.launched), default=self._newest)
        self._gate.reject_late(pending, what="a record")
        self._fold(self._gate.feed(window))
        self._fold_outside()

    def finish(self) -> None:
        """Folds everything that is left. Nothing may be fed afterwards."""
        self._fold(self._gate.finish())
        for entry in (*(entry for _, entry in self._outside), *self._pending.values()):
            self._fold_lines(OUTSIDE, entry)

    def tallies(self) -> dict[tuple[str, int, str], CountSummary]:
        """By kind of step, stream, and counter: an op's kind or ``sync``, or a copy's direction with its host memory or
        ``blocking``, as in ``h2d_pageable``."""
        return {place: _tally(seen, self.steps[place[0]]) for place, seen in sorted(self._seen.items())}

    def per_step(self, names: Names) -> dict[str, KindCounts]:
        kinds: dict[str, dict[str, Any]] = {kind: {"steps": self.steps[kind]} for kind in sorted(self.steps)}
        for (kind, stream, counter), tally in self.tallies().items():
            kinds[kind].setdefault(stream_name(names, stream), {})[counter] = tally
        return {kind: KindCounts.model_validate(counted) for kind, counted in kinds.items()}

    def _fold(self, complete: Iterable[StepInfo]) -> None:
        alike: defaultdict[tuple[tuple[str, ...], tuple[Any, ...]], int] = defaultdict(int)
        for info in complete:
            kinds = labels(info)
            entry = self._pending.pop(info.step, None)
            alike[kinds, () if entry is None else tuple(entry.counts.items())] += 1
            if entry is not None:
                self._fold_lines(info.kind, entry, steady=len(kinds) > 1)
        for (kinds, counts), steps in alike.items():
            for kind in kinds:
                self.steps[kind] += steps
                for (stream, counter), count in counts:
                    self._seen[kind, stream, counter][count] += steps

    def _fold_outside(self) -> None:
        """Folds records of no step, or of a step that was passed over, which count for no kind of step."""
        pending, passed = self._pending, self._gate.passed
        for step in [step for step in pending if step < 0]:
            self._outside.append((self._newest, pending.pop(step)))
        for step in [step for step in pending if step <= passed]:
            self._outside.append((step, pending.pop(step)))
        while self._outside and self._outside[0][0] <= passed:
            _, entry = self._outside.popleft()
            self._fold_lines(OUTSIDE, entry)

    def _fold_lines(self, kind: str, records: _Pending, *, steady: bool = False) -> None:
        """All copies, and all counted and waiting calls of one step. A copy belongs to the call that enqueued it; a
        kernel copy and a node of a graph have no call of their own."""
        copying = deque(sorted([call for call in records.calls if call.kind == "copy"], key=_start))
        others = [call for call in records.calls if call.kind != "copy"]
        for op in sorted(records.copies, key=_launched):
            what, _, stream, _, _, size, host_size, memory, blocking, where, _, _, site, launched, _ = op
            kernel = what == "kernel"
            memory = "pinned" if kernel else memory
            cost = self.copies[site, where, kind, stream, what, memory, blocking]
            cost.count += 1
            cost.steady += steady
            cost.bytes += host_size if kernel else size
            while copying and copying[0].end < launched:
                others.append(copying.popleft())
            if not kernel and copying and launched >= copying[0].start:
                self._charge(cost, copying.popleft())
        for call in (*others, *copying):
            purpose, name, _, _, waited, stream, where, _, site = call
            if purpose != "copy" or waited:
                cost = self.calls[site, where, kind, stream, name, purpose == "sync"]
                cost.count += 1
                cost.steady += steady
                self._charge(cost, call)

    def _charge(self, cost: Cost, call: Call) -> None:
        if call.waited:
            cost.host_ns += call.waited
            cost.exposed_ns += self._exposed(call)


def _tally(seen: Counter[int], steps: int) -> CountSummary:
    """Median, mean and max over ``steps`` steps of which those in ``seen`` had any."""
    steps_with = seen.total()
    ordered = [*repeat(0, steps - steps_with), *sorted(seen.elements())]
    mean = sum(ordered) / steps
    return CountSummary(median=median(ordered), mean=mean, max=ordered[-1], steps_with=steps_with)


Row = TypeVar("Row", CopyRow, SyncRow)


def stream_name(names: Names, stream: int) -> str:
    return names.streams.get(stream, f"stream {stream}" if stream >= 0 else "no stream")


def line_rows(row: type[Row], lines: Costs, names: Names) -> tuple[Row, ...]:
    """The rows of lines with their numbers resolved, in the order of ``weight``."""
    rows = [
        row(
            **dict(zip(row.model_fields, line, strict=False))
            | {
                "site": SitePart(**names.sites[line[0]]._asdict()) if line[0] >= 0 else None,
                "stream": stream_name(names, line[3]),
                "count": cost.count,
                "steady": cost.steady,
                "host_us": cost.host_ns / 1e3,
                "exposed_us": cost.exposed_ns / 1e3,
            }
            | ({"bytes": cost.bytes} if row is CopyRow else {})
        )
        for line, cost in lines.items()
    ]
    return tuple(sorted(rows, key=weight))


def weight(row: CopyRow | SyncRow) -> tuple[float, float, int, str]:
    """The most exposed time first, then the most waited time, then the largest count."""
    return -row.exposed_us, -row.host_us, -row.count, row.model_dump_json()
