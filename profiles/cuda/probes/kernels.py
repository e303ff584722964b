"""What kernels take by shape: products as a model has them, and a copy within the device."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from .timing import device_ns

ROWS: Final = (1, 4, 16, 64, 256, 1024, 4096)  # tokens of a forward
SHAPES: Final = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))  # (k, n) of an 8B layer's products
PEAK: Final = 8192  # of a cube whose rate is taken for the peak
MOVED: Final = 1 << 30  # bytes
DTYPES: Final = ("bfloat16", "float16", "float32")


def probe() -> dict[str, Any]:  # cuda-only
    return {
        "copy": _copy(),
        "peak": [_product(PEAK, PEAK, PEAK, dtype) for dtype in DTYPES],
        "gemm": [_product(m, n, k, "bfloat16") for m in ROWS for k, n in SHAPES],
    }


def _copy() -> dict[str, Any]:  # cuda-only
    source = torch.zeros(MOVED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {"bytes": 2 * MOVED, "device_ns": device_ns(partial(target.copy_, source), repeat=10)}


def _product(m: int, n: int, k: int, dtype: str) -> dict[str, Any]:  # cuda-only
    """``weight`` is transposed as a linear layer's is."""
    kind = getattr(torch, dtype)
    x, weight = torch.randn(m, k, dtype=kind, device="cuda"), torch.randn(n, k, dtype=kind, device="cuda")
    action = partial(torch.nn.functional.linear, x, weight)
    action()  # the library chooses its kernel
    torch.cuda.synchronize()
    return {"m": m, "n": n, "k": k, "dtype": dtype, "device_ns": device_ns(action, repeat=10)}
