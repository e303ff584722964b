"""Does CUPTI list a kernel's reads of host memory among the copies?"""

from __future__ import annotations

from typing import Any

import torch

from ...cuda.capture import KinetoWindow
from .expressions import tally
from .host_memory import WIDTH


def probe() -> dict[str, Any]:  # cuda-only
    from .triton_kernels import gather

    host = torch.ones(64, WIDTH).pin_memory()
    rows, target = torch.arange(64, device="cuda"), torch.empty(64, WIDTH, device="cuda")
    gather[(4,)](host, rows, target, 64, width=WIDTH)
    capture = KinetoWindow()
    capture.start()
    gather[(4,)](host, rows, target, 64, width=WIDTH)
    return {"seen": tally(capture.stop()), "bytes_read": host.nbytes}
