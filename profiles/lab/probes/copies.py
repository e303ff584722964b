"""Time of copies by size, direction and kind of host memory, and whether the call waits for a busy stream."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from .timing import device_ns, host_ns, keep_busy

SIZES: Final = (4, 4 << 10, 64 << 10, 128 << 10, 1 << 20, 64 << 20, 1 << 30)
BEHIND_BUSY: Final = (4 << 10, 64 << 10, (64 << 10) + 4, 1 << 20)
BUSY_MS: Final = 20


def probe() -> dict[str, Any]:  # cuda-only
    rows = [
        _row(size, pinned=pinned, up=up) for size in SIZES for pinned in (True, False) for up in (True, False)
    ]
    return {"idle": rows, "behind_busy": _behind_busy()}


def _row(size: int, *, pinned: bool, up: bool) -> dict[str, Any]:  # cuda-only
    source, target = _sides(size, pinned=pinned, up=up)
    few = 3 if size >= 64 << 20 else 30
    copy = partial(target.copy_, source, non_blocking=True)
    call = host_ns(copy, repeat=few, before=torch.cuda.synchronize)
    blocking = host_ns(partial(target.copy_, source), repeat=few, before=torch.cuda.synchronize)
    on_device = device_ns(copy, repeat=few) if pinned else None
    spent = on_device if on_device is not None else blocking["median"]
    return {
        "bytes": size,
        "direction": "h2d" if up else "d2h",
        "host_memory": "pinned" if pinned else "pageable",
        "call_ns": call,
        "blocking_ns": blocking,
        "device_ns": on_device,
        "bandwidth": size / spent * 1e9,
    }


def _behind_busy() -> list[dict[str, Any]]:  # cuda-only
    """Whether a non-blocking copy returns while its stream is busy."""
    rows = []
    for size in BEHIND_BUSY:
        for pinned, up in ((False, True), (False, False), (True, True), (True, False)):
            source, target = _sides(size, pinned=pinned, up=up)
            call = host_ns(
                partial(target.copy_, source, non_blocking=True),
                repeat=5,
                before=_busy_from_now,
            )
            where = {"direction": "h2d" if up else "d2h", "host_memory": "pinned" if pinned else "pageable"}
            rows.append({"bytes": size, **where, "call_ns": call, "waited": waited(call["median"])})
    return rows


def waited(call_ns: float) -> bool:
    """Whether a call behind a busy stream took long enough to have waited for it."""
    return call_ns > BUSY_MS * 1e6 / 4


def _busy_from_now() -> None:  # cuda-only
    torch.cuda.synchronize()
    keep_busy(BUSY_MS)


def _sides(size: int, *, pinned: bool, up: bool) -> tuple[torch.Tensor, torch.Tensor]:  # cuda-only
    """(source, target). The host's pages are written first, so that page faults are not measured."""
    host = torch.zeros(size // 4, dtype=torch.int32, pin_memory=pinned).fill_(1)
    device = torch.zeros(size // 4, dtype=torch.int32, device="cuda")
    return (host, device) if up else (device, host)
