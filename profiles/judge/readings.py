"""The numbers of a result that have a better side, by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from ..record.definitions import DEFINITIONS, PERCENTILES, definition
from ..record.result import Metric, Result

Sided = Literal["higher", "lower"]

_PERCENTILES: Final = (
    "p50",
    "p99",
)  # read unasked: every one more makes the others harder to tell from noise
_ENDINGS: Final = ("_throughput", "_ms")


class MetricReading(NamedTuple):
    value: float
    unit: str
    direction: Sided


def readings(result: Result, also: Collection[str] = ()) -> dict[str, MetricReading]:
    """Metrics by name: the mean over repeats, and percentiles as ``ttft_ms.p99`` where there are any, of the rarer ones
    those that are asked for by ``also``. Metrics that abstained, or that have no better side, are left out."""
    return {
        name: MetricReading(value, metric.unit, metric.direction)
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


def table(results: Sequence[Result], also: Collection[str] = ()) -> dict[str, list[MetricReading]]:
    """By metric, a reading of every result; metrics that not all of them have are left out."""
    read = [readings(result, also) for result in results]
    if not read:
        return {}
    return {name: [each[name] for each in read] for name in read[0] if all(name in each for each in read)}


def full_name(short: str) -> str:
    """``throughput`` is ``output_throughput``, ``ttft.p99`` is ``ttft_ms.p99``. Raises KeyError."""
    head, dot, rest = short.partition(".")
    if head == "throughput":
        head = "output_throughput"
    name = next((f"{head}{ending}" for ending in ("", *_ENDINGS) if f"{head}{ending}" in DEFINITIONS), head)
    whole = f"{name}{dot}{rest}"
    if definition(whole).direction == "none":
        raise KeyError(short)
    return whole
