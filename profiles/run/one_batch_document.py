"""Latencies of static batches as a versioned document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from ..platform.resolve import Resolved
from ..record.environment import environment, tool
from .crash import broken_on_purpose
from .machines import DeviceChoice, device_kind, open_machine
from .one_batch import BatchShape, BatchTimes, one_batch, run_batches, too_large
from .runner import GatedSink

SCHEMA_VERSION: Final = "1.0"
NS_PER_MS: Final = 1e6
NS_PER_S: Final = 1e9

Document = dict[str, Any]


def document(
    resolved: Resolved, shapes: Sequence[BatchShape], device: DeviceChoice, notice: Callable[[str], None]
) -> Document:
    """Run all shapes that fit. ``run`` of the document is the caller's. Raises OneBatchError and
    MachineError."""
    [relay] = resolved.relays
    kind = device_kind(device, resolved.scenario)
    refused = {shape: too_large(one_batch(resolved, shape), shape) for shape in shapes}
    fitting = [shape for shape in shapes if not refused[shape]]
    content: Document = {"labels": None}
    times: dict[BatchShape, BatchTimes] = {}
    if fitting:
        whole = one_batch(resolved, fitting[0])
        with open_machine(kind, whole, GatedSink()) as machine, broken_on_purpose(relay):
            content["labels"] = machine.labels.model_dump(mode="json")
            content["hardware"] = machine.hardware.model_dump(mode="json")
            for found in run_batches(resolved, machine, relay, fitting):
                times[found.shape] = found
                notice(f"{len(times)} of {len(fitting)}")
    points = [_point(shape, times.get(shape)) | {"refused": refused[shape] or None} for shape in shapes]
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": tool().model_dump(mode="json"),
        "environment": environment(),
        "scenario": {"expanded": resolved.scenario.expanded(), "sha256": resolved.scenario.sha256},
        "relay": {
            "state": relay.state.name,
            "policies": relay.policies(overlap=False),
            "faults": [fault.name for fault in relay.faults],
        },
        "conclusion": conclusion(points),
        **content,
        "points": points,
    }


def _point(shape: BatchShape, times: BatchTimes | None) -> Document:
    if times is None:
        names = (
            "prefill_ms",
            "prefill_throughput",
            "decode_ms",
            "decode_throughput",
            "total_ms",
            "throughput",
        )
        return {**shape._asdict(), **dict.fromkeys((*names, "digest"))}
    decode = times.decode
    return {
        **shape._asdict(),
        "prefill_ms": times.prefill / NS_PER_MS,
        "prefill_throughput": shape.batch * shape.prompt * NS_PER_S / times.prefill,
        "decode_ms": None if decode is None else decode / NS_PER_MS,
        "decode_throughput": None if decode is None else shape.batch * NS_PER_S / decode,
        "total_ms": times.total / NS_PER_MS,
        "throughput": shape.tokens * NS_PER_S / times.total,
        "digest": times.digest,
    }


def conclusion(points: Sequence[Document]) -> str:
    """Return the latencies of the smallest and of the largest batch that ran."""
    ran = sorted(
        (p for p in points if not p["refused"]), key=lambda p: (p["batch"] * p["prompt"], p["batch"])
    )
    ends = ran[:1] + ran[1:][-1:]
    said = [f"{_steps(point)} for {point['batch']} x {point['prompt']} prompt tokens" for point in ends]
    return f"{'; '.join(said)}." if said else ""


def _steps(point: Document) -> str:
    decode = "" if point["decode_ms"] is None else f", a decode {point['decode_ms']:.3g} ms"
    return f"a prefill takes {point['prefill_ms']:.3g} ms{decode}"
