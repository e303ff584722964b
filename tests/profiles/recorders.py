"""Sinks that record what a virtual GPU does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.record.timeline import Call, Op, Range, Wait, Window
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.profiles.vgpu.gpu import Values, open_vgpu


class WindowRecorder:
    """Keeps every window."""

    def __init__(self) -> None:
        self.windows: list[Window] = []

    def feed(self, window: Window) -> None:
        self.windows.append(window)

    @property
    def ops(self) -> Sequence[Op]:
        return [op for window in self.windows for op in window.ops]

    @property
    def names(self) -> list[str]:
        return [op.name for op in self.ops]

    @property
    def kinds(self) -> list[str]:
        return [op.kind for op in self.ops]

    @property
    def calls(self) -> Sequence[Call]:
        return [call for window in self.windows for call in window.calls]

    @property
    def ranges(self) -> Sequence[Range]:
        return [range_ for window in self.windows for range_ in window.ranges]

    @property
    def waits(self) -> Sequence[Wait]:
        return [wait for window in self.windows for wait in window.waits]


class OperationCounter(WindowRecorder):
    """Counts copies as ``h2d!`` (the host waited) or ``h2d``, syncs, and other operations by name."""

    gpu: VirtualGpu

    def since_last(self) -> Counter[str]:
        self.gpu.flush()
        counts = Counter(op.name if op.kind == "kernel" else op.kind + "!" * op.blocking for op in self.ops)
        counts.update(call.kind for call in self.calls if call.kind == "sync")
        self.windows.clear()
        return counts


@contextmanager
def counted_gpu(values: Values = "real") -> Iterator[OperationCounter]:
    counter = OperationCounter()
    with open_vgpu(load("h200"), sink=counter, values=values) as gpu:
        counter.gpu = gpu
        yield counter
