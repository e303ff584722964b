"""Defers computation: results are allocated at once and computed when their stream reaches the operation.

Memory that is not computed yet holds poison, so that a premature read yields no plausible value. Shapes come from
zeros in the arguments' place, once for each combination of arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from ....sched.kernels.declare import Kernel
from ..engine import EventRecording, StreamQueue
from ..executor import (
    Args,
    Executor,
    Kwargs,
    Operation,
    ResultSpecs,
    TensorSpec,
    allocate,
    compute_into,
    mapped,
    spec_of,
)
from ..runtime import Runtime
from .order import DeferredOrder, DeferredTask

# For 32- and 64-bit integers: not a valid index, length or token, and small enough for a loop over it to end.
POISON = -1_000_003
# As 32-bit integers, and two of them read as one of 64 bits.
_POISONS: Final = (POISON, (POISON << 32) | (POISON & 0xFFFFFFFF))
POISONED: Final = (
    "stands for a value of memory that was not written yet, or was freed, in this order of the streams"
)
_REACH: Final = 100_000  # of what a program adds to poison: a length, a place, a token


class AdversarialExecutor(Executor):
    """Calls ``immediate`` for each operation when the operation's stream reaches it."""

    eager = False

    def __init__(self, immediate: Executor, runtime: DeferredRuntime) -> None:
        super().__init__(immediate)
        self._runtime = runtime
        self._specs = ResultSpecs(computed=False)
        # Addresses of pinned memory that pending copies read and keep alive.
        self._pending_reads: list[int] = []

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        return poisoned(self.immediate.empty(spec))

    def compute(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        results = allocate(self._specs(op, args, kwargs), self.empty)
        self._defer(
            op.__name__, partial(compute_into, results, self.immediate.compute, (op, args, kwargs), {})
        )
        return results

    def mutate(self, op: Operation, args: Args, kwargs: Kwargs) -> None:
        self._defer(op.__name__, partial(self.immediate.mutate, op, args, kwargs))

    def launch(self, kernel: Kernel, args: Args) -> Any:
        results = allocate(mapped(kernel.meta(*args), spec_of), self.empty)
        self._defer(kernel.name, partial(compute_into, results, self.immediate.launch, (kernel, args), {}))
        return results

    def replay(self, nodes: Iterable[Callable[[], object]]) -> None:
        """Work of other streams may be done between any two nodes."""
        runtime = self._runtime
        describe = partial(self._description, "graph", runtime.sites.here())
        for node in nodes:
            runtime.order.launch(runtime.stream.id, DeferredTask(node, describe))

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool, waits: bool) -> None:
        """Pinned memory is read when the copy is executed; other memory is read inside the call."""
        values = source if pinned else source.clone()
        copy = partial(self.immediate.upload, target, values, pinned=pinned, waits=waits)
        if pinned:
            self._pending_reads.append(values.untyped_storage().data_ptr())
        self._defer("copy h2d", partial(self._read_out, values.untyped_storage(), copy) if pinned else copy)
        if waits:
            self._runtime.order.finish(self._runtime.stream.id)

    def download(self, target: torch.Tensor, source: torch.Tensor, *, waits: bool) -> None:
        if not waits:
            self._poison_host(target)
        self._defer("copy d2h", partial(self.immediate.download, target, source, waits=waits))
        if waits:
            self._runtime.order.finish(self._runtime.stream.id)

    def read(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        self._runtime.order.finish(self._runtime.stream.id)
        return self.immediate.read(op, args, kwargs)

    def _read_out(self, storage: torch.UntypedStorage, copy: Callable[[], object]) -> None:
        copy()
        self._pending_reads.remove(storage.data_ptr())

    def _poison_host(self, target: torch.Tensor) -> None:
        """At once, or in the stream's order if a pending copy still reads the same memory."""
        if target.untyped_storage().data_ptr() in self._pending_reads:
            self._defer("poison", partial(poisoned, target))
        else:
            poisoned(target)

    def _defer(self, name: str, work: Callable[[], object]) -> None:
        runtime = self._runtime
        site = runtime.sites.here()
        runtime.order.launch(runtime.stream.id, DeferredTask(work, partial(self._description, name, site)))

    def _description(self, name: str, site: int) -> str:
        where = self._runtime.sites.resolved()[site] if site >= 0 else None
        return f"{name} at {where.file}:{where.line}" if where else name


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Fill the tensor with a value that no program writes, and return it."""
    if tensor.is_meta:
        return tensor
    kind = tensor.dtype
    if kind.is_floating_point or kind.is_complex:
        return tensor.fill_(torch.nan)
    if kind is torch.bool:
        return tensor.fill_(True)
    wide = kind in (torch.int64, torch.int32)
    return tensor.fill_(POISON if wide else torch.iinfo(kind).max)


@contextmanager
def poison_explained() -> Iterator[None]:
    """Adds a note to an error of the block whose message has an integer that is poison, or near it."""
    try:
        yield
    except Exception as error:
        numbers = map(int, re.findall(r"-\d+", str(error)))
        found = next((n for n in numbers if any(abs(n - poison) <= _REACH for poison in _POISONS)), None)
        if found is not None:
            error.add_note(f"{found} {POISONED}")
        raise


class DeferredRuntime(Runtime):
    """The device's API: only what the host waits for is done by the time that the wait returns."""

    order: DeferredOrder

    def synchronize(self, stream: StreamQueue, *, site: int | None = None) -> None:
        super().synchronize(stream, site=site)
        self.order.finish(stream.id)

    def synchronize_event(self, stream: StreamQueue, recording: EventRecording) -> None:
        super().synchronize_event(stream, recording)
        self.order.reach(recording)

    def synchronize_device(self) -> None:
        super().synchronize_device()
        self.order.finish_all()

    def record(self, stream: StreamQueue) -> EventRecording:
        recording = super().record(stream)
        if self.capture is None:
            self.order.record(stream.id, recording)
        return recording

    def record_in_graph(self) -> EventRecording:
        recording = super().record_in_graph()
        self.order.record(self.stream.id, recording)
        return recording

    def wait_event(self, stream: StreamQueue, recording: EventRecording) -> None:
        super().wait_event(stream, recording)
        if self.capture is None:
            self.order.wait(stream.id, recording)

    def reached(self, recording: EventRecording) -> bool:
        reached = super().reached(recording)
        if reached:
            self.order.reach(recording)
        return reached

    def idle(self, stream: StreamQueue) -> bool:
        idle = super().idle(stream)
        if idle:
            self.order.finish(stream.id)
        return idle

    def flush(self) -> None:
        self.order.finish_all()
        super().flush()
