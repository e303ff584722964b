"""May CUPTI record here? A virtual machine's host can forbid it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ...cuda.capture import KinetoWindow


def probe() -> dict[str, Any]:  # cuda-only
    capture = KinetoWindow()
    capture.start()
    torch.ones(1024, device="cuda").add_(1)
    categories = Counter(row.category for row in capture.stop())
    return {"rows": dict(categories), "gpu_events": categories["kernel"] > 0}
