"""Device time of kernels by shape: matrix products and attention of a model, and a copy within the device."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from ....sched.kernels.attention import attention
from .timing import device_ns, measured

ROWS: Final = (1, 4, 16, 64, 256, 1024, 4096)  # tokens of a forward
SHAPES: Final = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))  # (k, n) of an 8B layer's products
PEAK: Final = 8192  # side of the cubic product whose rate is taken as the peak
MOVED: Final = 1 << 30  # bytes
DTYPES: Final = ("bfloat16", "float16", "float32")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of an 8B layer
# (requests, new tokens of each, tokens before them): decodes are bound by bytes, prompts by flops
ATTENTION_SHAPES: Final = (
    (1, 1, 4096),
    (64, 1, 1024),
    (64, 1, 4096),
    (1, 2048, 0),
    (4, 2048, 0),
    (4, 512, 2048),
)


def probe() -> dict[str, Any]:  # cuda-only
    return {
        "copy": _copy(),
        "peak": [_product(PEAK, PEAK, PEAK, dtype) for dtype in DTYPES],
        "gemm": [_product(m, n, k, "bfloat16") for m in ROWS for k, n in SHAPES],
        "attention": measured(_attention_rows),
    }


def attention_call(
    requests: int, new: int, before: int, *, device: str, dtype: torch.dtype
) -> partial[torch.Tensor]:
    """One layer's attention of ``requests`` requests, each with its own pages."""
    length, slots = before + new, requests * (before + new)
    q = torch.randn(requests * new, HEADS, HEAD_DIM, dtype=dtype, device=device)
    keys, values = torch.randn(2, slots, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    pages = torch.arange(slots, dtype=torch.int32, device=device).view(requests, length)
    rows = torch.arange(requests, device=device)
    lens = torch.full((requests,), length, device=device)
    added = None if new == 1 else torch.full((requests,), new, dtype=torch.int32, device=device)
    return partial(attention, q, keys, values, pages, rows, lens, added, HEAD_DIM**-0.5, length, new)


def _attention_rows() -> list[dict[str, Any]]:  # cuda-only
    rows = []
    for requests, new, before in ATTENTION_SHAPES:
        action = attention_call(requests, new, before, device="cuda", dtype=torch.bfloat16)
        action()  # compiles
        torch.cuda.synchronize()
        shape = {"requests": requests, "new": new, "before": before, "dtype": "bfloat16"}
        sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        rows.append({**shape, **sizes, "device_ns": device_ns(action, repeat=10)})
    return rows


def _copy() -> dict[str, Any]:  # cuda-only
    source = torch.zeros(MOVED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {"bytes": 2 * MOVED, "device_ns": device_ns(partial(target.copy_, source), repeat=10)}


def _product(m: int, n: int, k: int, dtype: str) -> dict[str, Any]:  # cuda-only
    """A product with a transposed weight, as in a linear layer."""
    kind = getattr(torch, dtype)
    x, weight = torch.randn(m, k, dtype=kind, device="cuda"), torch.randn(n, k, dtype=kind, device="cuda")
    action = partial(torch.nn.functional.linear, x, weight)
    action()  # the library chooses its kernel
    torch.cuda.synchronize()
    return {"m": m, "n": n, "k": k, "dtype": dtype, "device_ns": device_ns(action, repeat=10)}
