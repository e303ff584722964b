"""A virtual GPU in place of CUDA, watched from inside: its own hazard checker is off, and its times are not used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from schedbench import sched
from schedbench.profiles.cuda import machine as cuda_machine
from schedbench.profiles.cuda.hazards import HazardWatch, WatchedDevice
from schedbench.profiles.cuda.machine import VOID
from schedbench.profiles.platform.machine import Machine
from schedbench.profiles.platform.resolve import Resolved
from schedbench.profiles.record.timeline import Sink, Window
from schedbench.profiles.run import machines
from schedbench.profiles.run.system import ObserverGroup
from schedbench.profiles.vgpu.device import device
from schedbench.profiles.vgpu.tensor import DeviceTensor
from schedbench.sched.config import Capabilities

INLINE = 65536


def held(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DeviceTensor)
    return tensor.held


def watched(watch: Sequence[Path]) -> AbstractContextManager[HazardWatch]:
    """Watches the open virtual GPU."""
    module: Any = torch.get_device_module(device())
    return HazardWatch(
        WatchedDevice("vgpu", INLINE, module, tensors=DeviceTensor, real=held), watch
    ).installed()


class NullSink:
    def feed(self, window: Window) -> None: ...


@contextmanager
def open_vgpu_as_cuda(resolved: Resolved, sink: Sink) -> Iterator[Machine]:
    """Replaces ``open_cuda_with_hazards``."""
    folders = [Path(folder) for folder in sched.__path__]
    with machines.open_machine("vgpu", resolved, NullSink()) as machine, watched(folders) as seen:
        # The virtual GPU's observer advances the clock by which requests arrive.
        yield replace(
            machine,
            capabilities=Capabilities(),
            observer=ObserverGroup(machine.observer, seen),
            names=seen,
            hazards=seen.checker,
            peek=seen.peek,
            flush=lambda: seen.deliver(sink, machine.clock.now()),
            untimed=VOID,
        )


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on ``--device cuda`` with hazards opens the stand-in."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_machine, "open_cuda_with_hazards", open_vgpu_as_cuda)
