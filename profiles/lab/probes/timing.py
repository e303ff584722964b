"""Timing of short operations: on the host by the clock, on the device by two events around many repetitions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

CYCLES_PER_MS = 2_000_000  # at about 2 GHz; how long a stream is kept busy need not be exact

Action = Callable[[], object]


def measured(group: Callable[[], Any]) -> Any:
    """The result of a group of measurements, or its error, so that other groups still run."""
    try:
        return group()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Quantiles of at least one sample."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {
        "n": len(ordered),
        "min": ordered[0],
        "p10": ordered[round(last * 0.1)],
        "median": statistics.median(ordered),
        "p90": ordered[round(last * 0.9)],
    }


def host_ns(action: Action, *, repeat: int = 50, before: Action | None = None) -> dict[str, float]:
    """ns that the host spends in ``action``. ``before`` runs before each call and is not measured."""
    samples = []
    for _ in range(repeat):
        if before is not None:
            before()
        start = time.perf_counter_ns()
        action()
        samples.append(time.perf_counter_ns() - start)
    return spread(samples)


def keep_busy(milliseconds: float) -> None:  # cuda-only
    """Queue work of about that length on the current stream."""
    torch.cuda._sleep(round(milliseconds * CYCLES_PER_MS))


def device_ns(action: Action, *, repeat: int = 20) -> float:  # cuda-only
    """ns of one ``action`` on the current stream. Repetitions are queued while the stream is busy, so that their
    launches are not part of the time."""
    module: Any = torch.cuda
    start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    torch.cuda.synchronize()
    keep_busy(5)
    start.record()
    for _ in range(repeat):
        action()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end) * 1e6 / repeat)
