"""What Kineto of this torch writes: names and arguments of copies and syncs, stream ids, a graph's correlations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...cuda.capture import KinetoWindow, options, supported

EXAMPLES = 6  # of each category and name
HEADER = ("schemaVersion", "baseTimeNanoseconds", "displayTimeUnit")  # the rest names host and folder


def probe() -> dict[str, Any]:  # cuda-only
    capture = KinetoWindow()
    graph, buffer = _graph()
    capture.start()
    _copies()
    streams = _on_streams()
    graph.replay()
    torch.cuda.synchronize()
    trace = capture.trace()
    return {
        "options": supported(torch._C._profiler._ExperimentalConfig),
        "options_type": type(options()).__name__,
        "header": {
            key: value for key, value in trace.items() if key not in ("traceEvents", "deviceProperties")
        },
        "examples": examples(trace["traceEvents"]),
        "streams": {"handles": streams, "cupti": _cupti_streams(trace["traceEvents"])},
        "graph": replays(trace["traceEvents"]),
        "graph_nodes": int(buffer[0]),
        "metadata_json": _metadata(capture.profile),
    }


def _copies() -> None:  # cuda-only
    device = torch.zeros(1024, device="cuda")
    pageable, pinned = torch.ones(1024), torch.ones(1024, pin_memory=True)
    event = torch.cuda.current_stream().record_event()
    for source in (pageable, pinned):
        device.copy_(source, non_blocking=True)
        device.copy_(source)
        source.copy_(device, non_blocking=True)
        source.copy_(device)
    torch.empty_like(device).copy_(device)
    event.synchronize()
    torch.cuda.current_stream().synchronize()


def _on_streams() -> list[int]:  # cuda-only
    """Handles of the default stream and two others, each with a wait and an operation."""
    module: Any = torch.cuda
    sides = [module.Stream(), module.Stream()]
    done = module.current_stream().record_event()
    for side in sides:
        with module.stream(side):
            side.wait_event(done)
            torch.zeros(4096, device="cuda").add_(1)
    return [module.current_stream().cuda_stream, *(side.cuda_stream for side in sides)]


def _graph() -> tuple[Any, torch.Tensor]:  # cuda-only
    """Three kernels in a graph."""
    module: Any = torch.cuda
    buffer = torch.zeros(1024, device="cuda")
    buffer.add_(0)
    graph = module.CUDAGraph()
    with module.graph(graph):
        for _ in range(3):
            buffer.add_(1)
    return graph, buffer


def _metadata(profile: Any) -> dict[str, Any]:  # cuda-only
    """Whether bytes are in the in-process events too."""
    events = profile.profiler.kineto_results.events()
    having = [event.metadata_json() for event in events if hasattr(event, "metadata_json")]
    texts = [text for text in having if text]
    return {
        "events": len(events),
        "with_metadata": len(texts),
        "with_bytes": sum("bytes" in t for t in texts),
    }


def examples(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By category and name: how many, and the first few as they are."""
    found: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            found[f"{event.get('cat')}: {event.get('name', '')[:80]}"].append(event)
    return {name: {"count": len(rows), "first": rows[:EXAMPLES]} for name, rows in sorted(found.items())}


def replays(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each graph launch with the number of kernels that share its correlation."""
    rows = [event for event in events if event.get("ph") == "X"]
    kernels = Counter(row["args"].get("correlation") for row in rows if row.get("cat") == "kernel")
    launches = [row for row in rows if "GraphLaunch" in row.get("name", "")]
    return [{"name": row["name"], "kernels": kernels[row["args"].get("correlation")]} for row in launches]


def _cupti_streams(events: Iterable[Mapping[str, Any]]) -> list[int]:
    return sorted(
        {e["args"]["stream"] for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    )
