"""A virtual GPU in CUDA's place, watched from inside: its own watcher sees nothing, its own clocks are not asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from schedbench import sched
from schedbench.profiles.cuda.hazards.watch import HazardWatch, WatchedDevice, watching
from schedbench.profiles.cuda.machine import VOID, StepRecorder
from schedbench.profiles.platform.machine import Machine
from schedbench.profiles.platform.resolve import Resolved
from schedbench.profiles.record.timeline import Sink, Window
from schedbench.profiles.run import machines
from schedbench.profiles.vgpu.device import device
from schedbench.profiles.vgpu.tensor import DeviceTensor
from schedbench.sched.observe import Observer, StepInfo

INLINE = 65536


def held(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DeviceTensor)
    return tensor.held


def watched(watch: Sequence[Path]) -> AbstractContextManager[HazardWatch]:
    """Of the virtual GPU that is open."""
    module: Any = torch.get_device_module(device())
    return watching(WatchedDevice(module, "vgpu", INLINE, tensors=DeviceTensor, real=held), watch)


class Nobody:
    def feed(self, window: Window) -> None: ...


class Both(StepRecorder):
    """The virtual GPU's observer moves its clock, by which requests arrive."""

    def __init__(self, hazards: HazardWatch, own: Observer) -> None:
        super().__init__(hazards)
        self._own = own

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[Any]:
        return self._own.range(name, step, size)

    def stream(self, name: str, stream: Any) -> None:
        self._own.stream(name, stream)
        super().stream(name, stream)

    def launched(self, info: StepInfo) -> None:
        self._own.launched(info)
        super().launched(info)

    def settled(self, info: StepInfo) -> None:
        self._own.settled(info)
        super().settled(info)


@contextmanager
def open_vgpu_as_cuda(resolved: Resolved, sink: Sink) -> Iterator[Machine]:
    """In place of ``open_cuda_with_hazards``."""
    folders = [Path(folder) for folder in sched.__path__]
    with machines.open_machine("vgpu", resolved, Nobody()) as machine, watched(folders) as seen:
        steps = Both(seen, machine.observer)
        yield replace(
            machine,
            observer=steps,
            names=seen,
            hazards=seen.checker,
            peek=seen.peek,
            flush=lambda: steps.deliver(sink, 0, machine.clock.now()),
            untimed=VOID,
        )


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on ``--device cuda`` is the stand-in, where it is watched."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machines, "open_cuda_with_hazards", open_vgpu_as_cuda)
