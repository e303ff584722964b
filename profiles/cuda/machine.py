"""A CUDA device as the machine of a run that is measured, or whose accesses are checked for hazards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from ... import sched
from ...sched.config import Capabilities
from ...sched.observe import Observer, StepInfo
from ..platform.machine import Machine, MachineError
from ..platform.resolve import Resolved
from ..record.provenance import HardwarePart, Labels
from ..record.timeline import Sink, Window
from ..vgpu.sites import Sites
from .hazards.watch import HazardWatch, WatchedDevice, watching
from .kineto_window import KinetoWindow, identify, this_thread
from .log import WallClock, WatchedNames
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


VOID: Final = (
    "hazards were watched for from inside the process, which makes the host wait: times mean nothing"
)


class StepRecorder(Observer):
    """Records the steps and the names of streams, which is all that such a run measures."""

    def __init__(self, hazards: HazardWatch) -> None:
        self._hazards = hazards
        self._launched: list[StepInfo] = []
        self._settled: list[StepInfo] = []

    def stream(self, name: str, stream: Any) -> None:
        self._hazards.announce(name, stream)

    def launched(self, info: StepInfo) -> None:
        self._launched.append(info)

    def settled(self, info: StepInfo) -> None:
        self._settled.append(info)

    def deliver(self, sink: Sink, start: int, end: int) -> None:
        sink.feed(
            Window(start, end, ranges=[], ops=[], calls=[], launched=self._launched, settled=self._settled)
        )
        self._launched, self._settled = [], []


def require_one_device(resolved: Resolved) -> None:
    """Raises MachineError if there is no CUDA device, or if the scenario needs more than one."""
    require_cuda(
        "hazards of a real one cannot be checked; check --device vgpu checks those of the virtual GPU"
    )
    if resolved.scenario.engine.ranks > 1:
        raise MachineError("the scenario has several ranks: hazards are checked on one device only")


@contextmanager
def open_cuda_with_hazards(resolved: Resolved, sink: Sink) -> Iterator[Machine]:  # cuda-only
    """The current CUDA device, without gradients, until the block ends. Raises MachineError if there is none."""
    require_cuda()
    device = torch.device("cuda", torch.cuda.current_device())
    inline = round(resolved.hardware.copies.pageable_inline.value)
    watched = WatchedDevice(torch.cuda, device.type, inline)
    with torch.no_grad(), watching(watched, [Path(folder) for folder in sched.__path__]) as hazards:
        clock, steps = WallClock(), StepRecorder(hazards)
        yield Machine(
            device=device,
            capabilities=Capabilities(),
            clock=clock,
            observer=steps,
            names=hazards,
            labels=Labels(emulated=False, host="measured"),
            hardware=HardwarePart(name=torch.cuda.get_device_name(device)),
            exact=False,
            flush=lambda: steps.deliver(sink, 0, clock.now()),
            peek=hazards.peek,
            environment={name: fact for name, fact in facts(device).items() if name != "source_of_counts"},
            hazards=hazards.checker,
            untimed=VOID,
        )
