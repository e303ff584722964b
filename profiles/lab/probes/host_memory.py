"""Kernels that read pinned host memory: accepted by Triton? How fast, with how many programs?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from .timing import device_ns

PROGRAMS: Final = (1, 2, 4, 8, 16, 32, 64, 132)
WIDTH: Final = 1024  # float32: rows of 4 KiB
ROWS: Final = 16384  # 64 MiB

Launch = Callable[[int], object]  # with that many programs


def probe() -> dict[str, Any]:  # cuda-only
    from .triton_kernels import gather, gather_by_pointer

    host = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH).pin_memory()
    picked = torch.randperm(ROWS)[: ROWS // 4]
    target = torch.empty(len(picked), WIDTH, device="cuda")
    rows, pointers = picked.cuda(), (host.data_ptr() + picked * WIDTH * 4).cuda()
    kernels: dict[str, Launch] = {
        "tensor": lambda n: gather[(n,)](host, rows, target, len(picked), width=WIDTH),
        "pointers": lambda n: gather_by_pointer[(n,)](pointers, target, len(picked), width=WIDTH),
    }
    return {name: _measured(kernel, target, host[picked]) for name, kernel in kernels.items()}


def _measured(launch: Launch, target: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:  # cuda-only
    """Bytes per second by number of programs, or why it is refused."""
    try:
        target.zero_()
        launch(8)
        right = torch.equal(target.cpu(), expected)
    except Exception as error:
        return {"accepted": False, "error": f"{type(error).__name__}: {error}"[:500]}
    speeds = {str(n): target.nbytes / device_ns(partial(launch, n), repeat=3) * 1e9 for n in PROGRAMS}
    return {"accepted": True, "right": right, "bandwidth": speeds}
