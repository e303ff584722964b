"""Times of small things: on the host with a clock around them, on the device with two events around many."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

CYCLES_PER_MS = 2_000_000  # of a clock of about 2 GHz: a busy stream need not be busy for an exact time

Action = Callable[[], object]


def told(group: Callable[[], Any]) -> Any:
    """A group that fails says why; the others are measured all the same."""
    try:
        return group()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Of at least one sample."""
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
    """How long the host is inside ``action``; ``before`` runs each time, unmeasured."""
    samples = []
    for _ in range(repeat):
        if before is not None:
            before()
        start = time.perf_counter_ns()
        action()
        samples.append(time.perf_counter_ns() - start)
    return spread(samples)


def keep_busy(milliseconds: float) -> None:  # cuda-only
    """Give the current stream work of about that length."""
    torch.cuda._sleep(round(milliseconds * CYCLES_PER_MS))


def device_ns(action: Action, *, repeat: int = 20) -> float:  # cuda-only
    """Of one ``action`` on the current stream: many are queued behind a busy stream, so launching is not in it."""
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
