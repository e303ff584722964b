"""What expressions of Python become on CUDA: copies and syncs, as CUPTI sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...cuda.capture import KinetoWindow
from ...cuda.kineto import GPU, KinetoRow, call_kind, op_kind

Expression = Callable[[], object]


def probe() -> dict[str, Any]:  # cuda-only
    expressions = _expressions()
    for expression in expressions.values():
        expression()  # what a first call loads or tunes is not asked for
    found = {text: _seen(expression) for text, expression in expressions.items()}
    return {"expressions": found, "to_cpu_non_blocking_is_pinned": _is_pinned()}


def _expressions() -> Mapping[str, Expression]:  # cuda-only
    x = torch.arange(8.0, device="cuda")
    mask, lens = x > 3, torch.tensor([1, 2, 3], device="cuda")
    indices, wide = torch.tensor([1, 2], device="cuda"), torch.ones(64, 8, device="cuda")
    host = torch.arange(8.0)
    pinned = host.pin_memory()
    return {
        "x[0] = 1.0": lambda: x.__setitem__(0, 1.0),
        "x[1:3] = 1.0": lambda: x.__setitem__(slice(1, 3), 1.0),
        "x[1:2] = 1.0": lambda: x.__setitem__(slice(1, 2), 1.0),
        "x[mask] = 0.0": lambda: x.__setitem__(mask, 0.0),
        "x[mask]": lambda: x[mask],
        "x[indices]": lambda: x[indices],
        "x[[1, 2]]": lambda: x[[1, 2]],
        "x.item()": lambda: x[0].item(),
        "x.tolist()": x.tolist,
        "x.cpu()": x.cpu,
        "x.to('cpu', non_blocking=True)": lambda: x.to("cpu", non_blocking=True),
        "x.nonzero()": x.nonzero,
        "torch.unique(x)": lambda: torch.unique(x),
        "torch.tensor(list, device)": lambda: torch.tensor([1, 2], device="cuda"),
        "host.to(device)": lambda: host.to("cuda"),
        "host.to(device, non_blocking=True)": lambda: host.to("cuda", non_blocking=True),
        "pinned.to(device, non_blocking=True)": lambda: pinned.to("cuda", non_blocking=True),
        "host.to(device, float64, non_blocking=True)": lambda: host.to(
            "cuda", torch.float64, non_blocking=True
        ),
        "torch.where(mask, x, 1.0)": lambda: torch.where(mask, x, 1.0),
        "repeat_interleave(lens)": lambda: lens.repeat_interleave(lens),
        "repeat_interleave(lens, output_size)": lambda: lens.repeat_interleave(lens, output_size=6),
        "x.repeat_interleave(2)": lambda: x.repeat_interleave(2),
        "x.clone()": x.clone,
        "wide.t().contiguous()": lambda: wide.t().contiguous(),
        "torch.cat of one": lambda: torch.cat([x]),
        "torch.cat of two types": lambda: torch.cat([lens, lens.to(torch.int32)]),
        "zeros": lambda: torch.zeros(64, device="cuda"),
        "full": lambda: torch.full((64,), 2.0, device="cuda"),
        "sort": lambda: wide.sort(dim=1, stable=True),
        "wide @ wide.t()": lambda: wide @ wide.t(),
    }


def _is_pinned() -> bool:  # cuda-only
    return torch.ones(8, device="cuda").to("cpu", non_blocking=True).is_pinned()


def _seen(expression: Expression) -> dict[str, int]:  # cuda-only
    capture = KinetoWindow()
    capture.start()
    expression()
    return tally(capture.stop())


def tally(rows: Sequence[KinetoRow]) -> dict[str, int]:
    """Operations by kind and host memory, and calls that synchronise a stream or an event.

    Ending a window synchronises the device, so that is not among them.
    """
    ops = (op_kind(row) for row in rows if row.category in GPU)
    names = [" ".join(word for word in op if word) for op in ops if op is not None]
    syncs = [
        row.name for row in rows if call_kind(row.name) == "sync" and row.name != "cudaDeviceSynchronize"
    ]
    return dict(sorted(Counter([*names, *syncs]).items()))
