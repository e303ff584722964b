"""All sinks and observers of one run, and the parts of the result document that they fill.

Depends on the shape of the result, but on no scenario, device or file.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

from ...sched.observe import Clock, Observer
from ..record.result import Abstained, CopyRow, CriticalPathPart, IdlePart, KindCounts, SyncRow
from ..record.timeline import Names, Window
from .counts import CountsSink, line_rows
from .critical_path import CriticalPathSink
from .metrics import (
    Metrics,
    acceptance_metrics,
    forward_metrics,
    idle_part,
    plain,
    request_metrics,
    time_metric,
    waiting_metrics,
)
from .requests import RequestLog
from .steps import StepPeriods
from .waiting import BubbleSink, WaitingSink

if TYPE_CHECKING:
    import torch

_NO_PERIOD = "fewer than two launches without sleep between them"
_NO_IDLE = "fewer than two steps with forward kernels"


class ResultParts(NamedTuple):
    """Fields of ``Result`` of the same names."""

    metrics: Metrics
    per_step: dict[str, KindCounts]
    copies: tuple[CopyRow, ...]
    syncs: tuple[SyncRow, ...]
    idle: IdlePart | Abstained
    critical_path: dict[str, CriticalPathPart]


class LookupCount:
    """The lookups of requests longer than their buffers since the object was created. The newest token is never looked
    up and does not count. ``counted`` [2] int64 has the device's counts, total and missed, since the start; ``peek``
    reads a tensor without the device noticing; ``token_bytes`` is the size of the KV behind one lookup."""

    def __init__(
        self, counted: torch.Tensor, peek: Callable[[torch.Tensor], torch.Tensor], *, token_bytes: int
    ) -> None:
        self.token_bytes = token_bytes
        self._counted = counted
        self._peek = peek
        self._before: list[int] = peek(counted).tolist()

    def found(self) -> list[int]:
        """How many there were, and how many of them missed."""
        return [*map(sub, self._peek(self._counted).tolist(), self._before)]


class RunCollector:
    """A sink for the windows of the timeline, and the observers of the scheduler.

    ``sync_return`` is the virtual GPU's, in ns. A real device has no critical path: its records do not say what an
    operation started after. ``bubble`` is of a pipeline's stage.
    """

    def __init__(
        self,
        clock: Clock,
        lookups: LookupCount | None = None,
        *,
        sync_return: int | None = None,
        bubble: BubbleSink | None = None,
    ) -> None:
        self._lookups = lookups
        self.requests = RequestLog(clock)
        self.periods = StepPeriods(clock)
        self.waiting = WaitingSink()
        self.counts = CountsSink(self.waiting.take_exposed)
        self.bubble = bubble
        self._path = None if sync_return is None else CriticalPathSink(sync_return)

    @property
    def observers(self) -> tuple[Observer, ...]:
        return self.requests, self.periods

    def feed(self, window: Window) -> None:
        self.waiting.feed(window)
        self.counts.feed(window)
        if self.bubble is not None:
            self.bubble.feed(window)
        periods = self.waiting.take_periods()
        if self._path is not None:
            self._path.feed(window, periods)

    def finish(self, names: Names, *, drafts: int = 0) -> ResultParts:
        """Call it after the last window. ``drafts``: draft positions of the run, 0 without speculation."""
        waiting = self.waiting.finish()
        self.counts.finish()
        return ResultParts(
            metrics={
                **request_metrics(self.requests.totals),
                "step_ms": time_metric("step_ms", self.periods.periods, why=_NO_PERIOD),
                **forward_metrics(self.waiting.forwards),
                "idle_ms": time_metric("idle_ms", self.waiting.idle, why=_NO_IDLE),
                **waiting_metrics(waiting),
                **self._hot_buffer_metrics(),
                **acceptance_metrics(self.requests.totals.accepted, drafts),
            },
            per_step=self.counts.per_step(names),
            copies=line_rows(CopyRow, self.counts.copies, names),
            syncs=line_rows(SyncRow, self.counts.calls, names),
            idle=idle_part(waiting),
            critical_path=self._critical_path(),
        )

    def _critical_path(self) -> dict[str, CriticalPathPart]:
        if self._path is None:
            return {}
        self._path.finish(self.waiting.take_periods())
        steps, parts = self._path.steps, self._path.parts
        return {
            kind: CriticalPathPart(
                steps=steps[kind], total_ns=parts[kind].total(), parts_ns=dict(parts[kind])
            )
            for kind in steps
        }

    def _hot_buffer_metrics(self) -> Metrics:
        """Empty where all KV is on the device."""
        if self._lookups is None:
            return {}
        steps, (total, missed) = self.counts.steps["decode"], self._lookups.found()
        fetched = missed * self._lookups.token_bytes
        values = {
            "hisparse_hit_ratio": 1 - missed / total if total else None,
            "hisparse_swap_in_bytes_per_step": fetched / steps if steps else None,
        }
        why = "no decoding request was longer than its hot buffer"
        return {name: plain(name, value, why=why) for name, value in values.items()}
