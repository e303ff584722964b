"""A CUDA device as the machine of a run that is measured, or whose accesses are checked for hazards. A window of Kineto
has CUPTI's rows between start and stop, from torch.profiler's Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from ... import sched
from ...sched.config import Capabilities
from ..platform.machine import Machine, MachineError
from ..platform.resolve import Resolved
from ..record.files import packed_whole
from ..record.provenance import HardwarePart, Labels
from ..record.timeline import Sink
from .hazards import HazardWatch, WatchedDevice
from .kineto import API, GPU, KinetoRow, rows
from .log import StreamTable, WallClock
from .watch import DeviceHandle, Watch


class KinetoWindow:  # cuda-only
    """One window; its trace is kept in the file ``keep``, if given. The device is idle at both ends, because work that
    began before the window is lost."""

    def __init__(self, keep: Path | None = None) -> None:
        self._keep = keep

    def start(self) -> None:
        torch.cuda.synchronize()
        options: Any = torch._C._profiler._ExperimentalConfig
        self.profile: Any = profile(
            activities=[ProfilerActivity.CUDA],
            # Sync events and their metadata are off by default.
            experimental_config=options(enable_cuda_sync_events=True, expose_kineto_event_metadata=True),
            acc_events=True,  # there is one cycle; without this, torch 2.11 warns that others would be lost
        )
        self.profile.__enter__()

    def stop(self) -> list[KinetoRow]:
        """End the window and return the rows of its Chrome trace."""
        torch.cuda.synchronize()
        self.profile.__exit__(None, None, None)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.profile.export_chrome_trace(str(path))
            content = path.read_bytes()
        if self._keep is not None:
            with packed_whole(self._keep) as file:
                file.write(content)
        return rows(json.loads(content))


def identify(streams: StreamTable) -> frozenset[int]:  # cuda-only
    """Find CUPTI's numbers of the named streams, by one small operation on each in turn.

    Returns the numbers under which this thread's calls were listed. This window also contains CUPTI's start, which
    takes hundreds of milliseconds, so that no measured window does.
    """
    handles = streams.handles()
    external: Any = torch.cuda.ExternalStream
    capture = KinetoWindow()
    capture.start()
    for handle in handles:
        with torch.cuda.stream(external(handle) if handle else torch.cuda.default_stream()):
            torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    found = capture.stop()
    for cupti, handle in zip(streams_in_order(found), handles, strict=False):
        streams.identify(cupti, handle)
    return frozenset(row.thread for row in found if row.category in API)


def streams_in_order(found: Iterable[KinetoRow]) -> list[int]:
    """CUPTI's numbers of the streams with operations, in order of first use."""
    return list(dict.fromkeys(row.stream for row in found if row.category in GPU))


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
    with torch.no_grad(), Watch(cuda(keep_trace), sink, inline=inline).installed() as watch:
        yield _machine(
            device,
            clock=watch.clock,
            observer=watch,
            names=watch,
            flush=watch.flush,
            peek=torch.Tensor.cpu,
            environment=facts(device),
            traced=watch.traced,
            unwatched=watch.uninstalled,
        )


def _machine(device: torch.device, **parts: Any) -> Machine:  # cuda-only
    capabilities, labels = Capabilities(), Labels(emulated=False, host="measured")
    hardware = HardwarePart(name=torch.cuda.get_device_name(device))
    return Machine(device=device, capabilities=capabilities, labels=labels, hardware=hardware, **parts)


def cuda(keep_trace: Path | None = None) -> DeviceHandle:  # cuda-only
    return DeviceHandle(
        module=torch.cuda,
        type="cuda",
        handle=lambda stream: int(stream.cuda_stream),
        recorder=lambda: KinetoWindow(keep_trace),
        identify=identify,
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
    watched = WatchedDevice(device.type, inline, torch.cuda)
    folders = [Path(folder) for folder in sched.__path__]
    with torch.no_grad(), HazardWatch(watched, folders).installed() as hazards:
        clock = WallClock()
        yield _machine(
            device,
            clock=clock,
            observer=hazards,
            names=hazards,
            flush=lambda: hazards.deliver(sink, clock.now()),
            peek=hazards.peek,
            environment={name: fact for name, fact in facts(device).items() if name != "source_of_counts"},
            hazards=hazards.checker,
            untimed=VOID,
        )
