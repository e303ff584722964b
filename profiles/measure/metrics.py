"""The computation of metrics, by their names. A new metric of requests is one entry here, besides its Definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, median_low
from typing import Any, Final

from ..record.definitions import definition
from ..record.result import Abstained, IdlePart, Metric
from .distribution import Distribution, needed
from .intervals import counted
from .requests import Instant, RequestRecord, RequestTotals, between, tpot
from .waiting import Waiting


def steady_window(records: Iterable[RequestRecord]) -> tuple[int, int] | None:
    """Start and end, ns, of the longest stretch in which at least half as many requests run as at the peak; a request
    runs from its first admission to its end. The earliest of equals is taken::

        running   |      ____      ______________________
                  |   __|    |_   |                      |__
        peak / 2  |__|.........|__|.........................|__
                                    <---- steady window --->
    """
    levels = counted((r.first_scheduled, r.finish) for r in records if r.first_scheduled is not None)
    half = max((running for _, running in levels), default=0) / 2
    best: tuple[int, int] | None = None
    start: int | None = None
    for instant, running in levels:
        if running >= half and start is None:
            start = instant
        elif running < half and start is not None:
            if best is None or instant - start > best[1] - best[0]:
                best = start, instant
            start = None
    return best


def _per_second(counts: Mapping[str, int], start: int, end: int) -> dict[str, float | None]:
    """None where no time passed between the instants, ns."""
    return {name: count / ((end - start) / 1e9) if end > start else None for name, count in counts.items()}


def rates(records: Sequence[RequestRecord], tokens: Counter[int]) -> dict[str, float | None]:
    """Per second from the first arrival to the last end; None when no time passed. ``tokens``: as in
    ``RequestTotals``."""
    start = min((record.arrival for record in records), default=0)
    end = max((record.finish for record in records), default=0)
    finished = [record for record in records if record.finished]
    output_tokens, prompt_tokens = tokens.total(), sum(record.prompt_tokens for record in finished)
    counts = {
        "output_throughput": output_tokens,
        "input_throughput": prompt_tokens,
        "total_throughput": output_tokens + prompt_tokens,
        "request_throughput": len(finished),
    }
    return _per_second(counts, start, end)


def steady_rates(records: Sequence[RequestRecord], tokens: Counter[int]) -> dict[str, float | None]:
    """Per second of the steady window; None when there is none. A token that the host knew at an instant was made
    before it."""
    start, end = steady_window(records) or (0, 0)
    finishes = sum(record.finished and start < record.finish <= end for record in records)
    made = sum(tokens[at] for at in tokens if start < at <= end)
    counts = {"steady_output_throughput": made, "steady_request_throughput": finishes}
    return _per_second(counts, start, end)


Metrics = dict[str, Metric | Abstained]

NO_FORWARD: Final = "no whole forward was seen"
_NO_REQUEST: Final = "no request ran long enough"
_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_OVER_PASSES: Final[Mapping[str, Callable[[list[Any]], Any]]] = {
    "n": median_low,
    "min": min,
    "max": max,
    **dict.fromkeys(_QUANTILES, median),
}

_REQUEST_TIMES: Final[Mapping[str, Callable[[RequestTotals], Distribution]]] = {
    "ttft_ms": lambda totals: between(totals.records, "arrival", "first_token"),
    "queue_ms": lambda totals: between(totals.records, "arrival", "first_scheduled"),
    "tpot_ms": lambda totals: tpot(totals.records),
    "itl_ms": lambda totals: totals.gaps,
    "e2e_ms": lambda totals: between(totals.records, "arrival", "finish"),
}
_TRANSFER_TIMES: Final[Mapping[str, tuple[Instant, Instant]]] = {
    "prefill_ms": ("first_scheduled", "prefilled"),
    "transfer_ms": ("prefilled", "transferred"),
    "decode_queue_ms": ("transferred", "first_token"),
}
_WINDOW_SHARES: Final[Mapping[str, Callable[[Waiting], int]]] = {
    "forward_occupancy": lambda waiting: waiting.forward,
    "gpu_busy": lambda waiting: waiting.busy,
}
_STEP_TIMES: Final[Mapping[str, Callable[[Waiting], int]]] = {
    "forward_idle_us_per_step": lambda waiting: waiting.idle,
    "forward_gap_us_per_step": lambda waiting: waiting.inside,
    "host_stall_us_per_step": lambda waiting: waiting.stall,
    "exposed_stall_us_per_step": lambda waiting: waiting.exposed_stall,
    "exposed_host_us_per_step": lambda waiting: waiting.exposed_host,
}


def plain(name: str, value: float | None, *, why: str = "") -> Metric | Abstained:
    """A metric of one value. Abstains for the reason ``why`` where the value is None."""
    if value is None:
        return Abstained(abstained=why)
    entry = definition(name)
    return Metric(unit=entry.unit, direction=entry.direction, values=(value,))


def time_metric(name: str, samples: Distribution, *, why: str) -> Metric | Abstained:
    """A metric with quantiles, in ms; ``samples`` are in ns. Abstains for the reason ``why`` without samples."""
    if not len(samples):
        return Abstained(abstained=why)
    entry = definition(name)
    quantiles: dict[str, Any] = {percentile: _quantile(samples, percentile) for percentile in _QUANTILES}
    return Metric(
        unit=entry.unit,
        direction=entry.direction,
        values=(samples.mean / 1e6,),
        n=len(samples),
        min=samples.min / 1e6,
        max=samples.max / 1e6,
        **quantiles,
    )


def _quantile(samples: Distribution, percentile: str) -> float | Abstained:
    quantile = _QUANTILES[percentile]
    value = samples.quantile(quantile)
    if value is None:
        return Abstained(abstained=f"{percentile} needs {needed(quantile)} samples, there are {len(samples)}")
    return value / 1e6


def exact(metrics: Mapping[str, Metric | Abstained]) -> Metrics:
    """The metrics as those of a run whose times repeat byte for byte."""
    return {
        name: metric if isinstance(metric, Abstained) else metric.model_copy(update={"exact": True})
        for name, metric in metrics.items()
    }


def of_passes(passes: Sequence[Metrics]) -> Metrics:
    """The metrics of several passes of one workload, with a value for each pass that measured them. Percentiles are the
    median of those of the passes: further passes of the same requests have no other tail, so samples are not pooled."""
    names = dict.fromkeys(name for metrics in passes for name in metrics)
    found: Metrics = {}
    for name in names:
        each = [metric for metrics in passes if isinstance(metric := metrics.get(name), Metric)]
        found[name] = _of_passes(each) if each else passes[-1][name]
    return found


def _of_passes(each: Sequence[Metric]) -> Metric:
    if len(each) == 1:
        return each[0]
    changed: dict[str, Any] = {"values": tuple(value for metric in each for value in metric.values)}
    for name, over in _OVER_PASSES.items():
        known = [value for metric in each if isinstance(value := getattr(metric, name), int | float)]
        changed |= {name: over(known)} if known else {}
    return each[-1].model_copy(update=changed)


def request_metrics(totals: RequestTotals) -> Metrics:
    """Metrics of requests and of the tokens that they got."""
    records = totals.records
    admitted = [record for record in records if record.first_scheduled is not None]
    prompt_tokens = sum(record.prompt_tokens for record in admitted)
    cached_tokens = sum(record.cached_tokens for record in admitted)
    values: dict[str, float | None] = {
        **rates(records, totals.tokens),
        **steady_rates(records, totals.tokens),
        "cache_hit_ratio": cached_tokens / prompt_tokens if prompt_tokens else None,
        "retractions": totals.retractions,
        "peak_kv_tokens": totals.peak_kv_tokens,
    }
    return {
        **{name: plain(name, value, why=_NO_REQUEST) for name, value in values.items()},
        **{name: time_metric(name, times(totals), why=_NO_REQUEST) for name, times in _REQUEST_TIMES.items()},
    }


def transfer_metrics(totals: RequestTotals) -> Metrics:
    """The parts of the time to first token besides the queue, where prompts have workers of their own."""
    return {
        name: time_metric(name, between(totals.records, start, end), why=_NO_REQUEST)
        for name, (start, end) in _TRANSFER_TIMES.items()
    }


def forward_metrics(by_kind: Mapping[str, Distribution]) -> Metrics:
    everything = Distribution.merged(by_kind.values())
    metrics = {"forward_ms": time_metric("forward_ms", everything, why=NO_FORWARD)}
    for kind in sorted(by_kind):
        metrics[f"forward_ms.{kind}"] = time_metric("forward_ms", by_kind[kind], why=NO_FORWARD)
    return metrics


def acceptance_metrics(accepted: Counter[int], drafts: int) -> Metrics:
    """The acceptance of drafts: tokens per verify, and the share of verifies that accepted each of the first ``drafts``
    positions; empty for a run that does not speculate. ``accepted``: as in ``RequestTotals``."""
    verifies = accepted.total()
    if not drafts:
        return {}
    if not verifies:
        return {"accept_length": Abstained(abstained="nothing was verified")}
    values = {"accept_length": sum(length * times for length, times in accepted.items()) / verifies}
    for position in range(1, drafts + 1):
        reached = sum(times for length, times in accepted.items() if length > position)
        values[f"position_acceptance.{position}"] = reached / verifies
    return {name: plain(name, value) for name, value in values.items()}


def idle_part(waiting: Waiting) -> IdlePart:
    return IdlePart(
        **{name: getattr(waiting, name.removesuffix("_us")) / 1e3 for name in IdlePart.model_fields}
    )


def waiting_metrics(waiting: Waiting) -> Metrics:
    window, steps = waiting.window, waiting.steps
    values = {name: of(waiting) / window if window else None for name, of in _WINDOW_SHARES.items()}
    values |= {name: of(waiting) / 1e3 / steps if steps else None for name, of in _STEP_TIMES.items()}
    return {name: plain(name, value, why=NO_FORWARD) for name, value in values.items()}
