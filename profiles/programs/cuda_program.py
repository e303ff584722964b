"""What a program does with torch and CUDA besides work for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..captures.capture import CapturedRange
from ..vgpu.device import VirtualGpu


class NvtxRanges:
    """The ranges and marks that the program makes by ``torch.cuda.nvtx``, on the virtual host's clock."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.closed: list[CapturedRange] = []
        self._clock = gpu.clock
        self._open: list[tuple[str, int]] = []

    def push(self, message: str) -> int:
        self._open.append((message, self._clock.now()))
        return len(self._open) - 1

    def pop(self) -> int:
        """Returns the depth of the range that ends, and -1 where none is open, as NVTX does."""
        if not self._open:
            return -1
        name, start = self._open.pop()
        self.closed.append(CapturedRange(name, start, self._clock.now(), 0))
        return len(self._open)

    def mark(self, message: str) -> None:
        now = self._clock.now()
        self.closed.append(CapturedRange(message, now, now, 0))

    @contextmanager
    def range(self, message: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        self.push(message.format(*args, **kwargs))
        try:
            yield
        finally:
            self.pop()


class CudaProgram:
    """What the program did with ``torch.cuda`` besides work for the device. ``defaults`` are the queries that were
    answered by a constant, since the virtual GPU has no such quantity; ``uncompiled`` are what it gave to
    ``torch.compile``."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.nvtx = NvtxRanges(gpu)
        self.defaults: set[str] = set()
        self.uncompiled: set[str] = set()

    def default(self, name: str, value: Any) -> Callable[..., Any]:
        """A function that returns ``value``."""

        def answered(*args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
            self.defaults.add(name)
            return value

        return answered

    def notes(self) -> list[str]:
        """The notes of a result about them."""
        constant = "{} has no counterpart and was answered with a constant"
        kept = "torch.compile left {} as it is: each operator is a kernel"
        found = {constant: self.defaults, kept: self.uncompiled}
        return [note.format(name) for note, names in found.items() for name in sorted(names)]
