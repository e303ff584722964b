"""A CUDA device as the machine of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ... import sched
from ...sched.config import Capabilities
from ..platform.machine import Machine, MachineError
from ..platform.resolve import Resolved
from ..record.result import HardwarePart, Labels
from ..record.timeline import Sink
from ..vgpu.sites import Sites
from .clock import WallClock
from .kineto_window import KinetoWindow, identify, this_thread
from .streams import WatchedNames
from .watch import DeviceHandle, Watch


def require_cuda(consequence: str = "") -> None:
    """Raises MachineError, with what follows for the user, if there is no CUDA device."""
    if not torch.cuda.is_available():
        reason = "no CUDA device here (torch.cuda.is_available() is False)"
        raise MachineError(f"{reason}: {consequence}" if consequence else reason)


@contextmanager
def open_cuda(resolved: Resolved, sink: Sink, keep_trace: Path | None) -> Iterator[Machine]:  # cuda-only
    """The current CUDA device, without gradients, until the block ends. The trace of the last traced pass is kept in
    ``keep_trace``. Raises MachineError if there is no CUDA device."""
    require_cuda()
    device = torch.device("cuda", torch.cuda.current_device())
    inline = round(resolved.hardware.copies.pageable_inline.value)
    with torch.no_grad(), watched(cuda(keep_trace), sink, inline=inline) as (watch, clock, sites):
        yield Machine(
            device=device,
            capabilities=Capabilities(),
            clock=clock,
            observer=watch.observer,
            names=WatchedNames(sites, watch.streams),
            labels=Labels(emulated=False, host="measured"),
            hardware=HardwarePart(name=torch.cuda.get_device_name(device)),
            exact=False,
            flush=watch.flush,
            peek=torch.Tensor.cpu,
            environment=facts(device),
            traced=watch.traced,
            unwatched=watch.uninstalled,
        )


@contextmanager
def watched(device: DeviceHandle, sink: Sink, *, inline: int) -> Iterator[tuple[Watch, WallClock, Sites]]:
    """A watch of the device. The source lines that it records are those of sched/."""
    clock, sites = WallClock(), Sites([Path(folder) for folder in sched.__path__])
    watch = Watch(device, clock, sink=sink, sites=sites, inline=inline)
    with watch.installed():
        yield watch, clock, sites


def cuda(keep_trace: Path | None = None) -> DeviceHandle:  # cuda-only
    module: Any = torch.cuda
    return DeviceHandle(
        module=module,
        type="cuda",
        synchronize=torch.cuda.synchronize,
        event=lambda: module.Event(enable_timing=True),
        handle=lambda stream: int(stream.cuda_stream),
        current=lambda: int(module.current_stream().cuda_stream),
        recorder=lambda: KinetoWindow(keep_trace),
        identify=identify,
        threads=this_thread,
    )


def facts(device: torch.device) -> dict[str, Any]:  # cuda-only
    """Facts of the GPU, its driver and torch's CUDA."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_memory": properties.total_memory,
        "gpu_processors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": driver(),
        "source_of_counts": "torch.profiler (Kineto, CUPTI)",
    }


def driver(version: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of the driver's kernel module, as it reports it."""
    try:
        words = version.read_text(encoding="utf-8").split("\n", 1)[0].split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
