"""Digests of what every step did on the device, which show the steps that a change affects.

A row is a range, an operation, or a call that synchronises: its source line as file, function and statement, its kind,
stream and bytes, and whether the host may wait for it. Times are no part of it, nor whether a wait took any.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from ...sched.observe import StepInfo
from ..measure.counts import LAG
from ..measure.steps import StepGate
from ..record.timeline import NO_SITE, Names, Window

_CALLS: Final = frozenset({"sync", "event", "graph"})  # copies and launches are there as what they launched

T = TypeVar("T", bound=Hashable)


class StepPrint(NamedTuple):
    """One step. ``rows`` digests all of its rows, ``shape`` which rows there are, whatever their number and bytes."""

    kind: str
    batch_size: int
    num_tokens: int
    rows: str
    shape: str

    @property
    def batch(self) -> tuple[str, int, int]:
        return self.kind, self.batch_size, self.num_tokens


class _Row(NamedTuple):
    what: str
    memory: str
    stream: int
    site: int
    blocking: bool
    bytes: int
    host_bytes: int


class _Numbering(dict[T, int]):
    """Numbers distinct values from 0; equal values get the same number."""

    def __missing__(self, thing: T) -> int:
        return self.setdefault(thing, len(self))


class Fingerprints:
    """An instrument; ``steps`` has the steps in their order once the run is over."""

    def __init__(self) -> None:
        self.steps: tuple[StepPrint, ...] = ()
        self.begin()

    def begin(self) -> None:
        self._gate = StepGate(LAG)
        self._rows: _Numbering[_Row] = _Numbering()
        self._contents: _Numbering[tuple[int, ...]] = _Numbering()  # the sorted numbers of a step's rows
        self._pending: defaultdict[int, list[int]] = defaultdict(list)
        self._passed: list[tuple[StepInfo, int]] = []

    def feed(self, window: Window) -> None:
        for step, row in _rows(window):
            if step > self._gate.passed:
                self._pending[step].append(self._rows[row])
        self._fold(self._gate.feed(window))

    def finish(self, names: Names) -> None:
        self._fold(self._gate.finish())
        texts = [_text(row, names) for row in self._rows]
        bare = [_text(row._replace(bytes=0, host_bytes=0), names) for row in self._rows]
        prints = [
            (_digest(texts[row] for row in content), _digest({bare[row] for row in content}))
            for content in self._contents
        ]
        ordered = sorted(self._passed, key=lambda passed: passed[0].step)
        self.steps = tuple(
            StepPrint(info.kind, info.batch_size, info.num_tokens, *prints[content])
            for info, content in ordered
        )

    def _fold(self, complete: Iterable[StepInfo]) -> None:
        for info in complete:
            content = tuple(sorted(self._pending.pop(info.step, ())))
            self._passed.append((info, self._contents[content]))


def _rows(window: Window) -> Iterable[tuple[int, _Row]]:
    """Rows of steps, with the step's number."""
    for op in window.ops:
        if op.step >= 0:
            yield (
                op.step,
                _Row(op.kind, op.host_memory, op.stream, op.site, op.blocking, op.bytes, op.host_bytes),
            )
    for call in window.calls:
        if call.step >= 0 and call.kind in _CALLS:
            yield call.step, _Row(call.name, "", call.stream, call.site, call.kind == "sync", 0, 0)
    for span in window.ranges:
        if span.step >= 0:
            yield span.step, _Row(f"range {span.name}", "", -1, NO_SITE, False, 0, 0)


def _text(row: _Row, names: Names) -> str:
    """The row in a form that does not depend on the run or the checkout."""
    site: Sequence[Any] = ()
    if row.site != NO_SITE:
        place = names.sites[row.site]
        site = place.file, place.function, place.statement
    stream = names.streams.get(row.stream, str(row.stream))
    return repr((*site, stream, row.what, row.memory, row.blocking, row.bytes, row.host_bytes))


def _digest(texts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(sorted(texts)).encode(), digest_size=8).hexdigest()
