"""All sinks and listeners of one run, and the parts of the result document that they fill.

Knows the result's shape; knows nothing of scenarios, devices or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...sched.observe import Clock, Observer
from ..record.definitions import definition
from ..record.result import (
    Abstained,
    CopyRow,
    IdlePart,
    KindCounts,
    Metric,
    Outputs,
    RequestRow,
    SyncRow,
    digest,
)
from ..record.timeline import Names, Window
from . import latency
from .acceptance import AcceptanceLog
from .bubble import BubbleSink
from .counts import CountsSink
from .distribution import Distribution, needed
from .lookups import LookupCount
from .periods import StepPeriods
from .requests import Account, RequestLog, RequestRecord
from .rows import copy_rows, per_step, sync_rows
from .throughput import steady_throughput, throughput
from .waiting import Waiting, WaitingSink

Metrics = dict[str, Metric | Abstained]

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_NO_PERIOD = "fewer than two launches without sleep between them"
_NO_IDLE = "fewer than two steps with forward kernels"
NO_FORWARD = "no forward kernel was seen"


class ResultParts(NamedTuple):
    """Fields of ``Result`` of the same names."""

    metrics: Metrics
    per_step: dict[str, KindCounts]
    copies: tuple[CopyRow, ...]
    syncs: tuple[SyncRow, ...]
    idle: IdlePart | Abstained
    requests: tuple[RequestRow, ...]
    outputs: Outputs


class Swaps(NamedTuple):
    """What is counted of hot buffers."""

    lookups: LookupCount
    token_bytes: int  # of the KV behind one lookup


class RunCollector:
    """A sink for the timeline's windows, and listeners for the scheduler."""

    def __init__(self, clock: Clock, swaps: Swaps | None = None) -> None:
        self._swaps = swaps
        self.requests = RequestLog(clock)
        self.periods = StepPeriods(clock)
        self.acceptance = AcceptanceLog()
        self.waiting = WaitingSink()
        self.counts = CountsSink(self.waiting.take_exposed)
        self.bubble = BubbleSink()

    @property
    def listeners(self) -> tuple[Observer, ...]:
        return self.requests, self.periods, self.acceptance

    def feed(self, window: Window) -> None:
        self.waiting.feed(window)
        self.counts.feed(window)
        self.bubble.feed(window)

    def finish(self, names: Names, *, exact: bool, drafts: int = 0, save_tokens: bool = False) -> ResultParts:
        """After the last window. ``exact``: the numbers repeat byte for byte; ``drafts``: how many tokens deep the run
        speculates."""
        waiting = self.waiting.finish()
        self.counts.finish()
        records = self.requests.account.in_order()
        return ResultParts(
            metrics={
                **request_metrics(self.requests.account, exact=exact),
                "step_ms": distributed("step_ms", self.periods.periods, exact=exact, why=_NO_PERIOD),
                **forward_metrics(self.waiting.forwards, exact=exact),
                "idle_ms": distributed("idle_ms", self.waiting.idle, exact=exact, why=_NO_IDLE),
                **waiting_metrics(waiting, exact=exact),
                **self._swap_metrics(exact=exact),
                **acceptance_metrics(self.acceptance, drafts, exact=exact),
            },
            per_step=per_step(self.counts.steps, self.counts.tallies(), names),
            copies=copy_rows(self.counts.lines.copies, names),
            syncs=sync_rows(self.counts.lines.calls, names),
            idle=idle_part(waiting),
            requests=tuple(request_row(record, save_tokens=save_tokens) for record in records),
            outputs=Outputs(digest=digest((record.id, record.output_ids) for record in records)),
        )

    def _swap_metrics(self, *, exact: bool) -> Metrics:
        """None where all KV is on the device."""
        if self._swaps is None:
            return {}
        steps, lookups = self.counts.steps["decode"], self._swaps.lookups.found()
        fetched = lookups.missed * self._swaps.token_bytes
        values = {
            "hisparse_hit_ratio": lookups.hit_ratio,
            "hisparse_swap_in_bytes_per_step": fetched / steps if steps else None,
        }
        why = "no decoding request was longer than its hot buffer"
        return {name: plain(name, value, exact=exact, why=why) for name, value in values.items()}


def plain(name: str, value: float | None, *, exact: bool, why: str = "") -> Metric | Abstained:
    """A metric of one value; None abstains, saying why."""
    if value is None:
        return Abstained(abstained=why)
    entry = definition(name)
    return Metric(unit=entry.unit, direction=entry.direction, exact=exact, values=(value,))


def distributed(name: str, samples: Distribution, *, exact: bool, why: str) -> Metric | Abstained:
    """A metric with quantiles, from ns to ms; no samples abstain, saying why."""
    if not len(samples):
        return Abstained(abstained=why)
    entry = definition(name)
    return Metric(
        unit=entry.unit,
        direction=entry.direction,
        exact=exact,
        values=(samples.mean / 1e6,),
        n=len(samples),
        min=samples.min / 1e6,
        max=samples.max / 1e6,
        **{percentile: _quantile(samples, percentile) for percentile in _QUANTILES},
    )


def _quantile(samples: Distribution, percentile: str) -> float | Abstained:
    quantile = _QUANTILES[percentile]
    value = samples.quantile(quantile)
    if value is None:
        return Abstained(abstained=f"{percentile} needs {needed(quantile)} samples, there are {len(samples)}")
    return value / 1e6


def request_metrics(log: Account, *, exact: bool) -> Metrics:
    """What follows from requests and the tokens that they got."""
    records = log.records
    full = throughput(records, log.production)
    steady = steady_throughput(records, log.production)
    prompt_tokens = sum(record.prompt_tokens for record in records)
    cached = sum(record.cached_tokens for record in records)
    values = {
        "output_throughput": full and full.output,
        "input_throughput": full and full.input,
        "total_throughput": full and full.total,
        "request_throughput": full and full.requests,
        "steady_output_throughput": steady and steady.output,
        "steady_request_throughput": steady and steady.requests,
        "cache_hit_ratio": cached / prompt_tokens if prompt_tokens else None,
        "retractions": log.retractions,
        "peak_kv_tokens": log.peak_kv_tokens,
    }
    times = {
        "ttft_ms": latency.ttft(records),
        "queue_ms": latency.queueing(records),
        "tpot_ms": latency.tpot(records),
        "itl_ms": log.gaps,
        "e2e_ms": latency.e2e(records),
    }
    why = "no request ran long enough"
    metrics = {name: plain(name, value, exact=exact, why=why) for name, value in values.items()}
    return metrics | {name: distributed(name, time, exact=exact, why=why) for name, time in times.items()}


def forward_metrics(by_kind: Mapping[str, Distribution], *, exact: bool) -> Metrics:
    everything = Distribution.merged(by_kind.values())
    metrics = {"forward_ms": distributed("forward_ms", everything, exact=exact, why=NO_FORWARD)}
    for kind in sorted(by_kind):
        metrics[f"forward_ms.{kind}"] = distributed("forward_ms", by_kind[kind], exact=exact, why=NO_FORWARD)
    return metrics


def acceptance_metrics(log: AcceptanceLog, drafts: int, *, exact: bool) -> Metrics:
    """How drafts fared: nothing of a run that does not speculate."""
    if not drafts:
        return {}
    why = "nothing was verified"
    metrics = {"accept_length": plain("accept_length", log.accept_length, exact=exact, why=why)}
    for position, share in enumerate(log.by_position(drafts), 1):
        name = f"position_acceptance.{position}"
        metrics[name] = plain(name, share, exact=exact, why=why)
    return metrics


def waiting_metrics(waiting: Waiting, *, exact: bool) -> Metrics:
    ratios = {"forward_occupancy": waiting.forward, "gpu_busy": waiting.busy}
    times = {
        "forward_idle_us_per_step": waiting.idle,
        "forward_gap_us_per_step": waiting.inside,
        "host_stall_us_per_step": waiting.stall,
        "exposed_stall_us_per_step": waiting.exposed_stall,
        "exposed_host_us_per_step": waiting.exposed_host,
    }
    values = {name: ns / waiting.window if waiting.window else None for name, ns in ratios.items()}
    values |= {name: ns / 1e3 / waiting.steps if waiting.steps else None for name, ns in times.items()}
    return {name: plain(name, value, exact=exact, why=NO_FORWARD) for name, value in values.items()}


def idle_part(waiting: Waiting) -> IdlePart:
    return IdlePart(
        host_late_us=waiting.host_late / 1e3,
        launch_latency_us=waiting.launch_latency / 1e3,
        unnamed_host_us=waiting.unnamed_host / 1e3,
        dependency_us=waiting.dependency / 1e3,
        kernel_gap_us=waiting.kernel_gap / 1e3,
        no_work_us=waiting.no_work / 1e3,
        residue_us=waiting.residue / 1e3,
    )


def request_row(record: RequestRecord, *, save_tokens: bool) -> RequestRow:
    return RequestRow.model_validate(
        {
            "id": record.id,
            "arrival": record.arrival,
            "first_token": record.first_token,
            "finish": record.finish,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "status": record.status,
            "reason": record.reason,
            "token_ids": tuple(record.output_ids) if save_tokens else None,
        }
    )
