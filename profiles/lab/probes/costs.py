"""Host time of calls: launches, graphs, events, reads of single values, pinned blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from .timing import device_ns, host_ns, keep_busy, measured

NODES: Final = (10, 100, 500)


def probe() -> dict[str, Any]:  # cuda-only
    small = torch.zeros(64, device="cuda")
    groups: Mapping[str, Callable[[torch.Tensor], dict[str, Any]]] = {
        "launch": _launch,
        "triton": _triton,
        "graphs": _graphs,
        "events": _events,
        "reads": _reads,
        "pinned": _pinned,
    }
    return {name: measured(partial(group, small)) for name, group in groups.items()}


def _launch(small: torch.Tensor) -> dict[str, Any]:  # cuda-only
    action = partial(small.add_, 1)
    return {"host_ns": host_ns(action, repeat=200), "device_ns": device_ns(action, repeat=100)}


def _triton(small: torch.Tensor) -> dict[str, Any]:  # cuda-only
    from .triton_kernels import add_one

    def action() -> None:
        add_one[(1,)](small, 64, width=64)

    action()  # compiles
    return {"host_ns": host_ns(action, repeat=200), "device_ns": device_ns(action, repeat=100)}


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


def _events(small: torch.Tensor) -> dict[str, Any]:  # cuda-only
    module: Any = torch.cuda
    stream, side = module.current_stream(), module.Stream()
    event, timing = module.Event(), module.Event(enable_timing=True)
    event.record()
    return {
        "create_and_record": host_ns(lambda: module.Event().record()),
        "record": host_ns(event.record),
        "record_timing": host_ns(timing.record),
        "wait": host_ns(lambda: side.wait_event(event)),
        "wait_stream": host_ns(lambda: side.wait_stream(stream)),
        "query": host_ns(event.query),
        "synchronize_done": host_ns(event.synchronize, before=torch.cuda.synchronize),
        "stream_synchronize_done": host_ns(stream.synchronize, before=torch.cuda.synchronize),
        "record_stream": host_ns(lambda: small.record_stream(side)),
        "stream_context": host_ns(lambda: _enter(module, side)),
    }


def _enter(module: Any, stream: Any) -> None:  # cuda-only
    with module.stream(stream):
        return


def _reads(small: torch.Tensor) -> dict[str, Any]:  # cuda-only
    one = small[0]
    return {
        "item_idle": host_ns(one.item, before=torch.cuda.synchronize),
        "item_behind_5_ms": host_ns(one.item, repeat=5, before=lambda: keep_busy(5)),
        "tolist_idle": host_ns(small.tolist, before=torch.cuda.synchronize),
    }


def _pinned(small: torch.Tensor) -> dict[str, Any]:  # cuda-only
    page, sizes = torch.zeros(1024), iter(range(20, 30))
    return {
        "hit": host_ns(page.pin_memory),
        "tensor_hit": host_ns(lambda: torch.tensor([1, 2, 3], pin_memory=True)),
        "miss": host_ns(lambda: torch.empty(1 << next(sizes), dtype=torch.uint8, pin_memory=True), repeat=5),
        "to_device_from_fresh": host_ns(
            lambda: torch.tensor([1, 2, 3], pin_memory=True).to(small.device, non_blocking=True)
        ),
    }
