"""A CUDA device as the machine of a run whose accesses are checked for hazards from inside the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from .... import sched
from ....sched.config import Capabilities
from ....sched.observe import Observer, StepInfo
from ...platform.machine import Machine, MachineError
from ...platform.resolve import Resolved
from ...record.result import HardwarePart, Labels
from ...record.timeline import Sink, Window
from ..clock import WallClock
from ..machine import facts, require_cuda
from .watch import HazardWatch, WatchedDevice, watching

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
