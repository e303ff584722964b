"""All sinks and observers of one run, and the parts of the result document that they fill.

Depends on the shape of the result, but on no scenario, device or file.
"""

from __future__ import annotations

from typing import NamedTuple

from ...sched.observe import Clock, Observer
from ..record.result import (
    Abstained,
    CopyRow,
    IdlePart,
    KindCounts,
    Outputs,
    RequestRow,
    SyncRow,
    digest,
)
from ..record.timeline import Names, Window
from .acceptance import AcceptanceLog
from .bubble import BubbleSink
from .counts import CountsSink
from .lookups import LookupCount
from .metrics import (
    Metrics,
    acceptance_metrics,
    computes,
    forward_metrics,
    plain,
    request_metrics,
    time_metric,
    waiting_metrics,
)
from .periods import StepPeriods
from .requests import RequestLog, RequestRecord
from .rows import copy_rows, per_step, sync_rows
from .waiting import Waiting, WaitingSink

_NO_PERIOD = "fewer than two launches without sleep between them"
_NO_IDLE = "fewer than two steps with forward kernels"


class ResultParts(NamedTuple):
    """Fields of ``Result`` of the same names."""

    metrics: Metrics
    per_step: dict[str, KindCounts]
    copies: tuple[CopyRow, ...]
    syncs: tuple[SyncRow, ...]
    idle: IdlePart | Abstained
    requests: tuple[RequestRow, ...]
    outputs: Outputs


class HotBufferCount(NamedTuple):
    """What is needed to count the lookups in hot buffers."""

    lookups: LookupCount
    token_bytes: int  # of the KV behind one lookup


class RunCollector:
    """A sink for the windows of the timeline, and the observers of the scheduler."""

    def __init__(self, clock: Clock, hot_buffers: HotBufferCount | None = None) -> None:
        self._hot_buffers = hot_buffers
        self.requests = RequestLog(clock)
        self.periods = StepPeriods(clock)
        self.acceptance = AcceptanceLog()
        self.waiting = WaitingSink()
        self.counts = CountsSink(self.waiting.take_exposed)
        self.bubble = BubbleSink()

    @property
    def observers(self) -> tuple[Observer, ...]:
        return self.requests, self.periods, self.acceptance

    def feed(self, window: Window) -> None:
        self.waiting.feed(window)
        self.counts.feed(window)
        self.bubble.feed(window)

    @computes("step_ms", "idle_ms")
    def finish(self, names: Names, *, exact: bool, drafts: int = 0, save_tokens: bool = False) -> ResultParts:
        """Call it after the last window. ``exact``: the numbers repeat byte for byte; ``drafts``: draft positions of
        the run, 0 without speculation."""
        waiting = self.waiting.finish()
        self.counts.finish()
        records = self.requests.totals.in_order()
        return ResultParts(
            metrics={
                **request_metrics(self.requests.totals, exact=exact),
                "step_ms": time_metric("step_ms", self.periods.periods, exact=exact, why=_NO_PERIOD),
                **forward_metrics(self.waiting.forwards, exact=exact),
                "idle_ms": time_metric("idle_ms", self.waiting.idle, exact=exact, why=_NO_IDLE),
                **waiting_metrics(waiting, exact=exact),
                **self._hot_buffer_metrics(exact=exact),
                **acceptance_metrics(self.acceptance, drafts, exact=exact),
            },
            per_step=per_step(self.counts.steps, self.counts.tallies(), names),
            copies=copy_rows(self.counts.lines.copies, names),
            syncs=sync_rows(self.counts.lines.calls, names),
            idle=idle_part(waiting),
            requests=tuple(request_row(record, save_tokens=save_tokens) for record in records),
            outputs=Outputs(digest=digest((record.id, record.output_ids) for record in records)),
        )

    @computes("hisparse_hit_ratio", "hisparse_swap_in_bytes_per_step")
    def _hot_buffer_metrics(self, *, exact: bool) -> Metrics:
        """Empty where all KV is on the device."""
        if self._hot_buffers is None:
            return {}
        steps, lookups = self.counts.steps["decode"], self._hot_buffers.lookups.found()
        fetched = lookups.missed * self._hot_buffers.token_bytes
        values = {
            "hisparse_hit_ratio": lookups.hit_ratio,
            "hisparse_swap_in_bytes_per_step": fetched / steps if steps else None,
        }
        why = "no decoding request was longer than its hot buffer"
        return {name: plain(name, value, exact=exact, why=why) for name, value in values.items()}


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
