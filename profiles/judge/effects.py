"""What is compared of results: the metrics that have a better direction, by name, and the effects of a change besides
them: copies and syncs per step, by source line, and where the GPU waited.

Counts are exact. The steps of several runs of a side are pooled."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any, Final, Literal, NamedTuple

from ..measure.steps import OUTSIDE, STEADY
from ..record.definitions import DEFINITIONS, IDLE_PARTS, PERCENTILES, Definition, definition, full_name
from ..record.result import (
    STREAM_WAIT,
    Abstained,
    CopyRow,
    HazardFinding,
    KindCounts,
    Metric,
    RankPart,
    Result,
    SitePart,
    SyncRow,
)

Change = Literal["fewer", "more", "equal", "moved", "no steps"]
Results = Sequence[Result]
PerStep = Sequence[Mapping[str, KindCounts]]  # of runs
LineIdentity = tuple[str, str, str]  # file, function, and statement without its format

CHANCE: Final = 0.01  # below this probability, a difference is not chance
OFTEN: Final = 0.5  # per step; what changes by less may come from other batches
ADDABLE: Final = ("sync", "h2d", "d2h")  # counters of what a step can have more of than before
# Compared by default. Each further percentile makes the correction for multiple comparisons stricter.
_PERCENTILES: Final = ("p50", "p99")

# What a formatter of sources changes: spaces, and a comma before a closing bracket.
_FORMAT: Final = re.compile(r"\s+|,(?=\s*[)\]}])")


class MetricValue(NamedTuple):
    value: float
    unit: str
    direction: Literal["higher", "lower"]


def value_of(result: Result | RankPart, name: str) -> float | None:
    """The value of a metric; None where it abstained or is not there."""
    metric = result.metrics.get(name)
    return metric.value if isinstance(metric, Metric) and metric.values else None


def metric_values(result: Result, also: Collection[str] = ()) -> dict[str, MetricValue]:
    """Metrics by name: the median of timed passes, and percentiles as ``ttft_ms.p99``. Percentiles other than p50 and
    p99 are read only where ``also`` names them. Metrics that abstained or have no better direction are left out."""
    return {
        name: MetricValue(value, metric.unit, metric.direction)
        for metric_name, metric in result.metrics.items()
        if isinstance(metric, Metric) and metric.direction != "none"
        for name, value in _values(metric_name, metric, also)
    }


def _values(name: str, metric: Metric, also: Collection[str]) -> Iterator[tuple[str, float]]:
    if metric.values:
        yield name, metric.value
    for percentile in PERCENTILES:
        value, whole = getattr(metric, percentile), f"{name}.{percentile}"
        if isinstance(value, float | int) and (percentile in _PERCENTILES or whole in also):
            yield whole, float(value)


def why_absent(name: str, results: Results) -> str:
    """Why the first of the results without that metric or percentile has none; empty where all have it or none says."""
    whole, _, percentile = name.rpartition(".")
    metrics = [result.metrics for result in results]
    values = (each.get(name) or getattr(each.get(whole), percentile, None) for each in metrics)
    return next((value.abstained for value in values if isinstance(value, Abstained)), "")


def table(results: Sequence[Result], also: Collection[str] = ()) -> dict[str, list[MetricValue]]:
    """The values of every metric that all results have."""
    read = [metric_values(result, also) for result in results]
    if not read:
        return {}
    return {
        name: [values[name] for values in read] for name in read[0] if all(name in values for values in read)
    }


def has_verdict(entry: Definition) -> bool:
    """Whether it is a metric of which more or less is better, not a counter or a part of the time between forwards."""
    return entry.direction != "none" and not set(entry.tables) <= {"counts", "copies", "gpu waits"}


def judged_name(short: str) -> str:
    """The full name of a metric that has a verdict. Raises KeyError."""
    whole = full_name(short)
    if not has_verdict(definition(whole)):
        raise KeyError(short)
    return whole


def metric_names() -> tuple[str, ...]:
    """What ``judged_name`` understands, without percentiles and other variants."""
    metrics = (entry.name for entry in DEFINITIONS.values() if has_verdict(entry))
    return ("throughput", "ttft", "tpot", *metrics)


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Per step, over all steps of a kind: the median (of the medians of runs and ranks), the mean, the worst step."""

    median: float = 0.0
    mean: float = 0.0
    max: int = 0


class CounterEffect(NamedTuple):
    """``moved``: the mean is the same, its distribution over steps is not. ``a`` or ``b`` is
    None where that side has no steps of the kind; the change is then ``no steps``."""

    kind: str
    stream: str
    counter: str
    a: StepCounts | None
    b: StepCounts | None
    change: Change


class LineEffect(NamedTuple):
    """A source line's copies, syncs or waits per step of its kind. ``site`` has B's line number where B has it.
    A side that has no steps of the kind has None. ``worth_pct``: the part of B's throughput against A's that the line
    accounts for, all its copies, syncs and waits together; None where that was not computed, or cannot be."""

    site: SitePart | None
    range: str
    kind: str
    stream: str
    what: str
    a: float | None
    b: float | None
    exposed_a: float | None  # us per step
    exposed_b: float | None
    worth_pct: float | None = None


def counts(a: Results, b: Results) -> list[CounterEffect]:
    """Every counter that either side has, and its change from A to B, over the steps of all ranks."""
    return _changes(*([part for result in side for part in result.per_step_of_ranks] for side in (a, b)))


def _changes(a: PerStep, b: PerStep) -> list[CounterEffect]:
    tallies_a, tallies_b = _tallies(a), _tallies(b)
    kinds_a, kinds_b = (
        {kind for part in side for kind, counts in part.items() if counts.steps} for side in (a, b)
    )
    found = []
    for place in sorted({*tallies_a, *tallies_b}):
        x = tallies_a.get(place, StepCounts()) if place[0] in kinds_a else None
        y = tallies_b.get(place, StepCounts()) if place[0] in kinds_b else None
        found.append(CounterEffect(*place, x, y, _change(x, y)))
    return found


class AddedCount(NamedTuple):
    """B does ``more`` than A in the median step of the kind, and on average ``mean`` more; both are the average where
    only some steps run the lines."""

    kind: str
    counter: str
    more: float
    mean: float


def added(a: Results, b: Results) -> list[AddedCount]:
    """The copies and syncs of which B's steps have more than A's, all streams together, so that one that moves to
    another stream is not added: at least one more in the median step of any one rank, or more than by chance at lines
    that only one side has. A copy that the host waits for inside the call is a sync, too. Of steady decodes, what
    not all decodes have."""
    found = _at_new_lines(a, b)
    ranks = (zip(*(result.per_step_of_ranks for result in side), strict=False) for side in (a, b))
    often = (one for of_a, of_b in zip(*ranks, strict=False) for one in _often(of_a, of_b))
    for one in (*often, *_inside_copies(a, b)):
        place = one.kind, one.counter
        found[place] = max(one, found.get(place, one), key=attrgetter("more"))
    steady = [place for place in found if (place[0].removesuffix(STEADY), place[1]) in {*found} - {place}]
    listed = [found[place] for place in found if place not in steady]
    return sorted(listed, key=lambda one: (one.kind, ADDABLE.index(one.counter)))


def _often(a: PerStep, b: PerStep) -> Iterator[AddedCount]:
    """What the median step has more of, and half of the steps or more on average."""
    medians: defaultdict[tuple[str, str], float] = defaultdict(float)
    means: defaultdict[tuple[str, str], float] = defaultdict(float)
    for count in _changes(a, b):
        if count.counter in ADDABLE and count.a and count.b:
            medians[count.kind, count.counter] += count.b.median - count.a.median
            means[count.kind, count.counter] += count.b.mean - count.a.mean
    for place, more in medians.items():
        if more >= 1 and means[place] >= OFTEN:
            yield AddedCount(*place, more, round(means[place], 6))


def _inside_copies(a: Results, b: Results) -> Iterator[AddedCount]:
    """The syncs that B's steps have more of, waits inside copies included, where these grew by a half per step or
    more."""
    kinds = {kind for kind, steps in _steps(a).items() if steps}
    (inside_a, all_a), (inside_b, all_b) = _waits(a), _waits(b)
    for kind in sorted(kinds & {*inside_b}):
        more = round(all_b[kind] - all_a[kind], 6)
        if min(inside_b[kind] - inside_a[kind], more) >= OFTEN:
            yield AddedCount(kind, "sync", more, more)


def _waits(results: Results) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """For each kind of step: the waits inside copies per step, and all waits per step. A copy waits inside the call if
    it writes pageable memory, or reads more of it than the driver stages at once. Such a copy blocks, and its line has
    no sync."""
    syncs: Counter[tuple[str, ...]] = Counter()
    blocking: Counter[tuple[str, ...]] = Counter()
    for result in results:
        for (kind, _, _, _, *line), row in () if result.unrecorded else rows_of_steps(result):
            if isinstance(row, CopyRow):
                blocking[kind, *line] += row.count * row.blocking
            else:
                syncs[kind, *line] += row.count * row.sync
    steps = _steps(results)
    found: tuple[defaultdict[str, float], ...] = defaultdict(float), defaultdict(float)
    for per_step, counts in zip(found, (blocking - syncs, blocking | syncs), strict=True):
        for (kind, *_), count in counts.items():
            per_step[kind] += count / steps[kind] if steps[kind] else 0.0
    return found[0], found[1]


def _at_new_lines(a: Results, b: Results) -> dict[tuple[str, str], AddedCount]:
    """Copies and syncs per step, by kind and counter, at lines that A never runs, less those at lines that B never runs
    (a statement that was edited, moved or renamed), where the difference is not chance and most of it is one of all
    lines together: a line may take over what another one did."""
    if any(result.unrecorded for result in (*a, *b)):
        return {}
    steps, lines = (_steps(a), _steps(b)), (_counted(a), _counted(b))
    whole: tuple[Counter[tuple[str, str]], ...] = Counter(), Counter()
    only: tuple[Counter[tuple[str, str]], ...] = Counter(), Counter()
    for side, other in ((0, 1), (1, 0)):
        for (kind, counter, *line), count in lines[side].items():
            whole[side][kind, counter] += count
            if (kind, counter, *line) not in lines[other] and all(of[kind] for of in steps):
                only[side][kind, counter] += count
    found = {}
    for place, new in only[1].items():
        gone, (of_a, of_b) = only[0][place], (side[place[0]] for side in steps)
        more, mean = (x[1][place] / of_b - x[0][place] / of_a for x in (whole, only))
        if more > mean / 2 and _more_than_chance(new, gone, of_b / (of_a + of_b)):
            found[place] = AddedCount(*place, round(mean, 6), round(mean, 6))
    return found


def _more_than_chance(new: int, gone: int, share: float) -> bool:
    """Whether ``new`` of all are more than the share of all steps explains (binomial, one-sided)."""
    from scipy import stats  # most comparisons come without it

    return float(stats.binomtest(new, new + gone, share, alternative="greater").pvalue) < CHANCE


def _counted(results: Results) -> Counter[tuple[str, ...]]:
    """Copies and syncs by kind, counter and line, on any stream and in any range."""
    sums: Counter[tuple[str, ...]] = Counter()
    for result in results:
        for (kind, _, _, _, *line), row in rows_of_steps(result):
            counter = row.direction if isinstance(row, CopyRow) else "sync" if row.sync else ""
            if counter in ADDABLE:
                sums[kind, counter, *line] += row.count
    return sums


def _change(a: StepCounts | None, b: StepCounts | None) -> Change:
    if a is None or b is None:
        return "no steps"
    if a == b:
        return "equal"
    if a.mean == b.mean:
        return "moved"
    return "fewer" if b.mean < a.mean else "more"


def _tallies(parts: PerStep) -> dict[tuple[str, str, str], StepCounts]:
    """Runs and ranks are weighted by their steps. A counter that one does not have is 0."""
    steps: Counter[str] = Counter()
    sums: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    medians: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    worst: Counter[tuple[str, str, str]] = Counter()
    runs: Counter[str] = Counter()
    for part in parts:
        for kind, tallied in part.items():
            steps[kind] += tallied.steps
            runs[kind] += 1
            for stream, counters in tallied.streams.items():
                for counter, summary in counters.items():
                    place = kind, stream, counter
                    sums[place] += summary.mean * tallied.steps
                    medians[place].append(summary.median)
                    worst[place] = max(worst[place], summary.max)
    return {
        place: StepCounts(
            median([*seen, *[0.0] * (runs[place[0]] - len(seen))]),
            round(sums[place] / steps[place[0]], 6) if steps[place[0]] else 0.0,
            worst[place],
        )
        for place, seen in medians.items()
    }


def lines(a: Results, b: Results) -> list[LineEffect]:
    """Source lines of steps, the largest difference first, waits of streams behind the others of which steps have
    ``OFTEN`` more or fewer, and lines of kinds that only one side has last. Lines are matched by file, function and
    statement, since line numbers move; the statement's format does not count. Empty where a side recorded no lines."""
    if any(result.unrecorded for result in (*a, *b)):
        return []
    sites: dict[tuple[str, ...], SitePart | None] = {}
    rates = [(_per_step(side, sites), _steps(side)) for side in (a, b)]
    found = []
    for key in sorted(sites):
        kind, stream, where, what = key[:4]
        x, y = (rate.get(key, (0.0, 0.0)) if steps[kind] else (None, None) for rate, steps in rates)
        found.append(LineEffect(sites[key], where, kind, stream, what, x[0], y[0], x[1], y[1]))
    return sorted(found, key=_order)


def _order(line: LineEffect) -> tuple[bool, bool, bool, float]:
    known = line.a is not None and line.b is not None
    change = abs((line.b or 0.0) - (line.a or 0.0))
    return not known, change < OFTEN, line.what == STREAM_WAIT, -change


def _steps(results: Results) -> Counter[str]:
    return sum((result.steps() for result in results), Counter())


def _per_step(
    results: Results, sites: dict[tuple[str, ...], SitePart | None]
) -> dict[tuple[str, ...], tuple[float, float]]:
    """The count and the exposed us per step of the kind."""
    steps = _steps(results)
    times: Counter[tuple[str, ...]] = Counter()
    exposed: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for result in results:
        for key, row in rows_of_steps(result):
            sites[key] = row.site
            times[key] += row.count
            exposed[key] += row.exposed_us
    return {
        key: (round(count / steps[key[0]], 6), round(exposed[key] / steps[key[0]], 6))
        for key, count in times.items()
        if steps[key[0]]
    }


def rows_of_steps(result: Result) -> Iterator[tuple[tuple[str, ...], CopyRow | SyncRow]]:
    """Each copy and sync of a step, with what identifies it in other runs: the kind of step first, no line number."""
    rows: tuple[CopyRow | SyncRow, ...] = (*result.copies, *result.syncs)
    for row in rows:
        if row.kind != OUTSIDE:
            yield (
                (row.kind, row.stream, row.range, row.what, *(line_identity(row.site) if row.site else ())),
                row,
            )


def line_identity(site: SitePart) -> LineIdentity:
    """What identifies a source line in other versions of the source."""
    return site.file, site.function, _FORMAT.sub("", site.statement)


def new_hazards(a: Results, b: Results) -> tuple[HazardFinding, ...]:
    """The undeclared hazards of B that A has not, by resource and statements; none where A was not watched."""
    if any(isinstance(result.hazards, Abstained) for result in a):
        return ()
    before, after = ({_accesses(one): one for result in side for one in _findings(result)} for side in (a, b))
    return tuple(one for accesses, one in after.items() if accesses not in before)


def _findings(result: Result) -> tuple[HazardFinding, ...]:
    return () if isinstance(result.hazards, Abstained) else result.hazards.findings


def _accesses(found: HazardFinding) -> tuple[object, ...]:
    places = [access.site for access in (found.first, found.second) if access is not None]
    return found.resource, *((at.file, at.function, at.statement) if at else None for at in places)


def idle(a: Results, b: Results) -> list[dict[str, Any]]:
    """Forward idle and its parts on both sides, us per step that ran a forward, as the mean of all ranks; None where a
    side did not measure it. Host late is split as in the metrics."""
    names = (*IDLE_PARTS, "exposed_stall", "exposed_host", "forward_idle")
    return [{"part": name, "a": _mean_part(a, name), "b": _mean_part(b, name)} for name in names]


def _mean_part(results: Results, name: str) -> float | None:
    parts = (part for result in results for part in (result.ranks or (result,)))
    values = [value for part in parts if (value := _part(part, name)) is not None]
    return sum(values) / len(values) if values else None


def _part(result: Result | RankPart, name: str) -> float | None:
    if name not in IDLE_PARTS:
        return value_of(result, f"{name}_us_per_step")
    total = value_of(result, "forward_idle_us_per_step")
    if total is None or isinstance(result.idle, Abstained):
        return None
    whole = sum(getattr(result.idle, f"{part}_us") for part in IDLE_PARTS)
    part: float = getattr(result.idle, f"{name}_us")
    return total * part / whole if whole else 0.0
