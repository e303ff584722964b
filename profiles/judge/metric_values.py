"""The values of a result's metrics that have a better direction, by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from ..record.definitions import DEFINITIONS, PERCENTILES, Definition, definition
from ..record.result import Metric, Result

Sided = Literal["higher", "lower"]

# Compared by default. Each further percentile makes the correction for multiple comparisons stricter.
_PERCENTILES: Final = ("p50", "p99")
_ENDINGS: Final = ("_throughput", "_ms")


class MetricValue(NamedTuple):
    value: float
    unit: str
    direction: Sided


def mean(result: Result, name: str) -> float | None:
    """The mean of a metric over its values; None where it abstained or is not there."""
    metric = result.metrics.get(name)
    return sum(metric.values) / len(metric.values) if isinstance(metric, Metric) and metric.values else None


def metric_values(result: Result, also: Collection[str] = ()) -> dict[str, MetricValue]:
    """Metrics by name: the mean over repeats, and percentiles as ``ttft_ms.p99``. Percentiles other than p50 and
    p99 are read only where ``also`` names them. Metrics that abstained or have no better direction are left out."""
    return {
        name: MetricValue(value, metric.unit, metric.direction)
        for metric_name, metric in result.metrics.items()
        if isinstance(metric, Metric) and metric.direction != "none"
        for name, value in _values(metric_name, metric, also)
    }


def _values(name: str, metric: Metric, also: Collection[str]) -> Iterator[tuple[str, float]]:
    if metric.values:
        yield name, sum(metric.values) / len(metric.values)
    for percentile in PERCENTILES:
        value, whole = getattr(metric, percentile), f"{name}.{percentile}"
        if isinstance(value, float | int) and (percentile in _PERCENTILES or whole in also):
            yield whole, float(value)


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


def full_name(short: str) -> str:
    """``throughput`` is ``output_throughput``, ``ttft.p99`` is ``ttft_ms.p99``. Raises KeyError."""
    head, dot, rest = short.partition(".")
    if head == "throughput":
        head = "output_throughput"
    name = next((f"{head}{ending}" for ending in ("", *_ENDINGS) if f"{head}{ending}" in DEFINITIONS), head)
    whole = f"{name}{dot}{rest}"
    if not has_verdict(definition(whole)):
        raise KeyError(short)
    return whole
