"""Engagement of a change: the share of steps that A and B did differently, over the kinds in which any step differs.

Steps are compared by digests of what each did on the device. A row is a range, an operation, or a call that
synchronises: its source line as file, function and statement, its kind, stream and bytes, and whether the host may wait
for it. Times are no part of it, nor whether a wait took any.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

from ...sched.observe import StepInfo
from ..measure.counts import COUNTS_LAG
from ..measure.steps import StepGate
from ..record.result import Result
from ..record.timeline import NO_SITE, Names, Window
from .effects import CHANCE, rows_of_steps

THRESHOLD: Final = 5.0  # percent, below which no verdict is given
_CALLS: Final = frozenset({"sync", "event", "graph"})  # copies and launches are there as what they launched


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


class Fingerprints:
    """An instrument; ``steps`` has the steps in their order once the run is over."""

    def __init__(self) -> None:
        self.steps: tuple[StepPrint, ...] = ()
        self.begin()

    def begin(self) -> None:
        self._gate = StepGate(COUNTS_LAG)
        # The number of each row, and of the sorted numbers of each step's rows.
        self._rows: defaultdict[_Row, int] = defaultdict(count().__next__)
        self._contents: defaultdict[tuple[int, ...], int] = defaultdict(count().__next__)
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


class DifferingShare(NamedTuple):
    """``differing`` of ``steps`` steps of a kind."""

    differing: float
    steps: int

    @property
    def percent(self) -> float:
        return 100 * self.differing / self.steps if self.steps else 0.0


class StepEngagement(NamedTuple):
    """``kinds`` has every step kind. ``basis`` is how steps were compared:

    - steps: A and B ran the same batches; each step is compared with its counterpart, row by row;
    - kinds: their batches differ, and with them bytes and numbers of rows, so those are left out. Of each kind, the
      share of steps whose rows are not matched by the other side's share: the total variation distance. A
      distance that other batches alone explain (chi-squared, p above 0.01) is none;
    - totals: of stored results and engines, which keep no steps. The largest difference in the count of any one
      statement, or in a stream's kernels;
    - nothing: of stored results that recorded no source lines. There are no ``kinds``, and the engagement is unknown.
    """

    basis: str
    kinds: Mapping[str, DifferingShare]

    @property
    def engaged(self) -> DifferingShare:
        """The sum over the kinds in which any step differs."""
        touched = [share for share in self.kinds.values() if share.differing]
        return DifferingShare(
            sum(share.differing for share in touched), sum(share.steps for share in touched)
        )

    @property
    def percent(self) -> float:
        return self.engaged.percent


def engagement(a: Sequence[StepPrint], b: Sequence[StepPrint]) -> StepEngagement:
    """The engagement between two runs of one workload."""
    kinds = sorted({step.kind for step in (*a, *b)})
    if [step.batch for step in a] == [step.batch for step in b]:
        steps = Counter(step.kind for step in a)
        differing = Counter(x.kind for x, y in zip(a, b, strict=True) if x.rows != y.rows)
        return StepEngagement("steps", {kind: DifferingShare(differing[kind], steps[kind]) for kind in kinds})
    return StepEngagement("kinds", {kind: _distance(_shapes(a, kind), _shapes(b, kind)) for kind in kinds})


def total(parts: Iterable[StepEngagement]) -> StepEngagement:
    """The engagement over several pairs of runs, with the weakest basis of all."""
    parts = tuple(parts)
    differing: defaultdict[str, float] = defaultdict(float)
    steps: Counter[str] = Counter()
    for part in parts:
        for kind, share in part.kinds.items():
            differing[kind] += share.differing
            steps[kind] += share.steps
    basis = max(
        (part.basis for part in parts), key=("steps", "kinds", "totals", "nothing").index, default="steps"
    )
    return StepEngagement(
        basis, {kind: DifferingShare(differing[kind], steps[kind]) for kind in sorted(steps)}
    )


def from_totals(a: Result, b: Result) -> StepEngagement:
    """The engagement between stored results."""
    if a.unrecorded or b.unrecorded:
        return StepEngagement("nothing", {})
    sums_a, sums_b = _sums(a), _sums(b)
    kinds = {}
    for kind in sorted({*a.per_step, *b.per_step}):
        if "." in kind:
            continue
        steps_a, steps_b = (side.steps()[kind] for side in (a, b))
        steps = min(steps_a, steps_b) or max(steps_a, steps_b)
        rows = {row for row in (*sums_a, *sums_b) if row[0] == kind}
        rates = [abs(sums_a[row] / (steps_a or 1) - sums_b[row] / (steps_b or 1)) for row in rows]
        rate = max([*rates, *_kernels(a, b, kind)], default=0.0)
        kinds[kind] = DifferingShare(steps * min(rate, 1.0), steps)
    return StepEngagement("totals", kinds)


def _kernels(a: Result, b: Result, kind: str) -> Iterator[float]:
    """By how many kernels the steps differ on each stream, of which no lines are kept. Where the median steps have as
    many, it is the batches that differ."""
    found = [side.per_step[kind].streams for side in (a, b) if kind in side.per_step]
    for stream in {stream for streams in found for stream in streams}:
        counts = [streams.get(stream, {}).get("kernel") for streams in found]
        medians, means = ([getattr(x, part) if x else 0.0 for x in counts] for part in ("median", "mean"))
        if len(found) == 2 and medians[0] != medians[1]:
            yield abs(means[0] - means[1])


def _shapes(steps: Sequence[StepPrint], kind: str) -> Counter[str]:
    return Counter(step.shape for step in steps if step.kind == kind)


def _distance(a: Counter[str], b: Counter[str]) -> DifferingShare:
    count_a, count_b = a.total(), b.total()
    if not count_a or not count_b:
        return DifferingShare(count_a + count_b, count_a + count_b)
    shared = sum(min(a[shape] / count_a, b[shape] / count_b) for shape in a)
    steps = min(count_a, count_b)
    by_chance = shared and _homogeneous(a, b)
    return DifferingShare(0.0 if by_chance else steps * max(1 - shared, 0.0), steps)


def _homogeneous(a: Counter[str], b: Counter[str]) -> bool:
    """Whether both can be samples of one distribution of shapes."""
    from scipy import stats

    shapes = sorted({*a, *b})
    table = [[side[shape] for shape in shapes] for side in (a, b)]
    return len(shapes) == 1 or float(stats.chi2_contingency(table).pvalue) > CHANCE


def _sums(result: Result) -> Counter[tuple[str, ...]]:
    """Counts by statement, wherever the statement is: one that moved to another function does the same."""
    sums: Counter[tuple[str, ...]] = Counter()
    for (kind, stream, range_, what, *line), row in rows_of_steps(result):
        sums[kind, stream, range_, what, *line[2:]] += row.count
    return sums
