"""Engagement of a change: the share of steps that A and B did differently, over the kinds in which any step differs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ..record.result import Result
from .effects import rows_of_steps
from .fingerprint import StepPrint

THRESHOLD: Final = 5.0  # percent, below which no verdict is given
CHANCE: Final = 0.01


class DifferingShare(NamedTuple):
    """``differing`` of ``steps`` steps of a kind."""

    differing: float
    steps: int


class StepEngagement(NamedTuple):
    """``kinds`` has every step kind. ``basis`` is how steps were compared:

    - steps: A and B ran the same batches; each step is compared with its counterpart, row by row;
    - kinds: their batches differ, and with them bytes and numbers of rows, so those are left out. Of each kind, the
      share of steps whose rows are not matched by the other side's share: the total variation distance. A
      distance that other batches alone explain (chi-squared, p above 0.01) is none;
    - totals: of stored results, which keep no steps. The largest difference in the count of any one source line;
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
        differing, steps = self.engaged
        return 100 * differing / steps if steps else 0.0


def engagement(a: Sequence[StepPrint], b: Sequence[StepPrint]) -> StepEngagement:
    """The engagement between two runs of one workload."""
    if [step.batch for step in a] == [step.batch for step in b]:
        return StepEngagement("steps", _aligned(a, b))
    kinds = sorted({step.kind for step in (*a, *b)})
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
        rates = (abs(sums_a[row] / (steps_a or 1) - sums_b[row] / (steps_b or 1)) for row in rows)
        kinds[kind] = DifferingShare(steps * min(max(rates, default=0.0), 1.0), steps)
    return StepEngagement("totals", kinds)


def _aligned(a: Sequence[StepPrint], b: Sequence[StepPrint]) -> dict[str, DifferingShare]:
    steps = Counter(step.kind for step in a)
    differing = Counter(x.kind for x, y in zip(a, b, strict=True) if x.rows != y.rows)
    return {kind: DifferingShare(differing[kind], steps[kind]) for kind in sorted(steps)}


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
    sums: Counter[tuple[str, ...]] = Counter()
    for key, row in rows_of_steps(result):
        sums[key] += row.count
    return sums
