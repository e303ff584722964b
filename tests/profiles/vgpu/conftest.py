"""A virtual GPU, its windows, and a hardware profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from schedbench.profiles.platform.hardware import HardwareProfile, load
from schedbench.profiles.record.result import HazardFinding
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.profiles.vgpu.gpu import open_vgpu
from tests.profiles.recorders import WindowRecorder


class Bench:
    """A virtual GPU under observation."""

    def __init__(self, gpu: VirtualGpu, recorder: WindowRecorder) -> None:
        self.gpu = gpu
        self.recorder = recorder

    def observe(self, body: Callable[[], Any]) -> WindowRecorder:
        """Returns what the device and the host did in ``body``, which starts on an idle device."""
        self.gpu.flush()
        self.recorder.windows.clear()
        body()
        self.gpu.flush()
        return self.recorder

    def spent(self, action: Callable[[], Any]) -> int:
        """Returns ns on the host's clock."""
        before = self.gpu.clock.now()
        action()
        return self.gpu.clock.now() - before


class Scene:
    """Two named streams of a virtual GPU."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.gpu = gpu
        self.device = gpu.device
        self.module: Any = torch.get_device_module(gpu.device)
        self.schedule, self.forward = self.module.Stream(), self.module.Stream()
        gpu.observer.stream("schedule", self.schedule)
        gpu.observer.stream("forward", self.forward)

    def on(self, stream: Any) -> Any:
        return self.module.stream(stream)

    def settled(self, values: list[int]) -> torch.Tensor:
        """Makes a tensor on the schedule stream, which every stream and the host waits for."""
        with self.on(self.schedule):
            made = torch.tensor(values, device=self.device)
        self.module.synchronize()
        return made

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Makes a tensor on the schedule stream, which the forward stream waits for."""
        with self.on(self.schedule):
            made = torch.zeros(*shape, dtype=dtype, device=self.device)
        self.forward.wait_stream(self.schedule)
        return made

    @property
    def found(self) -> list[HazardFinding]:
        return list(self.gpu.findings)


Opener = Callable[..., AbstractContextManager[Bench]]


@pytest.fixture
def hardware() -> HardwareProfile:
    return load("h200")


@pytest.fixture
def opened(hardware: HardwareProfile) -> Opener:
    @contextmanager
    def opener(**options: Any) -> Iterator[Bench]:
        recorder = WindowRecorder()
        options.setdefault("watch", [Path(__file__).parent])
        with open_vgpu(options.pop("hardware", hardware), sink=recorder, **options) as gpu:
            yield Bench(gpu, recorder)

    return opener


@pytest.fixture
def bench(opened: Opener) -> Iterator[Bench]:
    with opened() as bench:
        yield bench


@pytest.fixture
def bench_none(opened: Opener) -> Iterator[Bench]:
    """A virtual GPU with values none."""
    with opened(values="none") as bench:
        yield bench
