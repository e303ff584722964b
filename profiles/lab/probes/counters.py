"""Torch's own announcements of syncs against CUPTI's records of the same calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ...cuda.capture import KinetoWindow
from ...cuda.kineto import call_kind


def probe() -> dict[str, Any]:  # cuda-only
    """Announcements stay switched on until the process ends."""
    from torch.cuda import _gpu_trace

    announced: Counter[str] = Counter()
    counting: Any = torch._C
    counting._activate_gpu_trace()
    _gpu_trace.register_callback_for_stream_synchronization(_counter(announced, "cudaStreamSynchronize"))
    _gpu_trace.register_callback_for_event_synchronization(_counter(announced, "cudaEventSynchronize"))
    _work()
    capture = KinetoWindow()
    capture.start()
    announced.clear()
    _work()
    told = dict(announced)
    recorded = Counter(row.name for row in capture.stop() if call_kind(row.name) == "sync")
    return {"announced": told, "recorded": dict(recorded)}


def _counter(announced: Counter[str], name: str) -> Callable[[int], None]:
    def count(handle: int) -> None:  # noqa: ARG001
        announced[name] += 1

    return count


def _work() -> None:  # cuda-only
    x = torch.arange(16.0, device="cuda")
    module: Any = torch.cuda
    for _ in range(3):
        x[0].item()
    x.tolist()
    x[x > 3].sum()
    torch.tensor([1, 2, 3], device="cuda")
    event = module.Event()
    event.record()
    event.synchronize()
    module.current_stream().synchronize()
