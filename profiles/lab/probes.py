"""Probes: small measurements of a machine with a GPU, each run in a process of its own:
``python -m schedbench.profiles.lab.probes NAME OUTPUT.json``.

A probe returns what was measured and draws no conclusions. ``schedbench calibrate`` fits a hardware profile to
``copies``, ``costs`` and ``kernels``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ...sched.kernels.allocation import decode_inputs
from ...sched.kernels.attention import attention
from ...sched.kernels.dense import rms_norm
from ...sched.kernels.rows import decode_positions
from ..cuda.machine import facts
from ..record.environment import environment, version
from ..record.files import write_whole

# ---- timing: on the host by the clock, on the device by two events around many repetitions ----------------

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


# ---- the machine, its GPU, and the versions of packages -------------------------------------------------------

_PACKAGES = ("triton", "nvtx", "llguidance", "pydantic", "safetensors", "typer", "pytest", "hypothesis")


def environment_probe() -> dict[str, Any]:  # cuda-only
    return {
        **environment(),
        **facts(torch.device("cuda", 0)),
        "devices": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "packages": {name: version(name) for name in _PACKAGES},
    }


# ---- copies by size, direction and kind of host memory, and uploads behind a busy stream --------------------------

COPY_SIZES: Final = (4, 4 << 10, 64 << 10, 128 << 10, 1 << 20, 64 << 20, 1 << 30)
BEHIND_BUSY: Final = (4 << 10, 64 << 10, (64 << 10) + 4, 1 << 20)
BUSY_MS: Final = 20


def copies_probe() -> dict[str, Any]:  # cuda-only
    rows = [
        _copy_row(size, pinned=pinned, up=up)
        for size in COPY_SIZES
        for pinned in (True, False)
        for up in (True, False)
    ]
    return {"idle": rows, "behind_busy": _behind_busy()}


def _copy_row(size: int, *, pinned: bool, up: bool) -> dict[str, Any]:  # cuda-only
    source, target = _sides(size, pinned=pinned, up=up)
    few = 3 if size >= 64 << 20 else 30
    copy = partial(target.copy_, source, non_blocking=True)
    call = host_ns(copy, repeat=few, before=torch.cuda.synchronize)
    blocking = host_ns(partial(target.copy_, source), repeat=few, before=torch.cuda.synchronize)
    on_device = device_ns(copy, repeat=few) if pinned else None
    return {
        "bytes": size,
        "direction": "h2d" if up else "d2h",
        "host_memory": "pinned" if pinned else "pageable",
        "call_ns": call,
        "blocking_ns": blocking,
        "device_ns": on_device,
    }


def _behind_busy() -> list[dict[str, Any]]:  # cuda-only
    """Whether a non-blocking upload from pageable memory returns while its stream is busy."""
    rows = []
    for size in BEHIND_BUSY:
        source, target = _sides(size, pinned=False, up=True)
        call = host_ns(partial(target.copy_, source, non_blocking=True), repeat=5, before=_busy_from_now)
        where = {"bytes": size, "direction": "h2d", "host_memory": "pageable"}
        rows.append({**where, "call_ns": call, "waited": waited(call["median"])})
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


# ---- host time of calls: launches, graphs, events, pinned blocks --------------------------------------------------

NODES: Final = (10, 100, 500)


def costs_probe() -> dict[str, Any]:  # cuda-only
    small = torch.zeros(64, device="cuda")
    return {
        "launch": measured(partial(_launch, small)),
        "engine_kernels": measured(_engine_kernels),
        "graphs": measured(partial(_graphs, small)),
        "events": measured(_events),
        "pinned": measured(lambda: {"hit": host_ns(torch.zeros(1024).pin_memory)}),
    }


def _launch(small: torch.Tensor) -> dict[str, Any]:  # cuda-only
    action = partial(small.add_, 1)
    return {"host_ns": host_ns(action, repeat=200), "device_ns": device_ns(action, repeat=100)}


def _engine_kernels() -> dict[str, Any]:  # cuda-only
    """Host time of kernels with few and with many arguments, through torch's dispatcher and Triton's launcher."""
    b, width = 8, 256
    ids = torch.arange(1, b + 1, device="cuda")
    table = torch.zeros(b + 1, width, dtype=torch.int32, device="cuda")
    x = torch.zeros(b, width, device="cuda")
    actions: dict[str, Action] = {
        "decode_positions": partial(decode_positions, ids),
        "decode_inputs": partial(decode_inputs, ids.repeat(2), ids, ids, table, None, width),
        "rms_norm": partial(rms_norm, x, x[0], 1e-6),
    }
    for action in actions.values():
        action()  # compiles
    return {name: host_ns(action, repeat=200) for name, action in actions.items()}


def _graphs(small: torch.Tensor) -> dict[str, Any]:  # cuda-only
    module: Any = torch.cuda
    found = {}
    for nodes in NODES:
        graph = module.CUDAGraph()
        with module.graph(graph):
            for _ in range(nodes):
                small.add_(1)
        graph.replay()
        found[str(nodes)] = {
            "host_ns": host_ns(graph.replay, repeat=50, before=torch.cuda.synchronize),
            "device_ns": device_ns(graph.replay, repeat=10),
        }
    return found


def _events() -> dict[str, Any]:  # cuda-only
    module: Any = torch.cuda
    stream, side, event = module.current_stream(), module.Stream(), module.Event()
    event.record()
    return {
        "record": host_ns(event.record),
        "wait": host_ns(lambda: side.wait_event(event)),
        "stream_synchronize_done": host_ns(stream.synchronize, before=torch.cuda.synchronize),
    }


# ---- device time of kernels by shape: products and attention of a model, and a copy within the device -----------

ROWS: Final = (1, 4, 16, 64, 256, 1024, 4096)  # tokens of a forward
SHAPES: Final = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))  # (k, n) of an 8B layer's products
PEAK: Final = 8192  # side of the cubic product whose rate is taken as the peak
MOVED: Final = 1 << 30  # bytes
DTYPES: Final = ("bfloat16", "float16", "float32")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of an 8B layer
# (requests, new tokens of each, tokens before them) of prompts, whose attention is bound by flops
ATTENTION_SHAPES: Final = ((1, 2048, 0), (4, 2048, 0), (4, 512, 2048))


def kernels_probe() -> dict[str, Any]:  # cuda-only
    source = torch.zeros(MOVED, dtype=torch.uint8, device="cuda")
    copy = partial(torch.empty_like(source).copy_, source)
    return {
        "copy": {"bytes": 2 * MOVED, "device_ns": device_ns(copy, repeat=10)},
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


def _product(m: int, n: int, k: int, dtype: str) -> dict[str, Any]:  # cuda-only
    """A product with a transposed weight, as in a linear layer."""
    kind = getattr(torch, dtype)
    x, weight = torch.randn(m, k, dtype=kind, device="cuda"), torch.randn(n, k, dtype=kind, device="cuda")
    action = partial(torch.nn.functional.linear, x, weight)
    action()  # the library chooses its kernel
    torch.cuda.synchronize()
    return {"m": m, "n": n, "k": k, "dtype": dtype, "device_ns": device_ns(action, repeat=10)}


# In the order in which they run.
PROBES: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    "environment": environment_probe,
    "copies": copies_probe,
    "costs": costs_probe,
    "kernels": kernels_probe,
}


def main(name: str, output: str) -> int:
    write_whole(Path(output), json.dumps(PROBES[name](), indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
