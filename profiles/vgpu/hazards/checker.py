"""Compares every access with those before it: first by order, and only then by place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch

from ...record.hazards import FoundHazard
from ...record.timeline import Site
from ..watcher import Watcher
from .blocks import Block, FreeBlocks
from .declared import Declared
from .findings import Findings
from .footprints import ByteSpan, Footprint, Grid, Indexed, Scattered, span
from .memory import Memory, Program
from .pools import Pool, unread
from .recording import FootprintRecording
from .shadows import UNKNOWN, IssuedOp, Owner, Shadow

if TYPE_CHECKING:
    from ....sched.kernels.registry import Kernel

_SHADOW = "_vgpu_shadow"  # on a storage's Python object, which lives as long as the storage


class Checker(Watcher):
    """Told of every operation, in the order in which the host issues them."""

    def __init__(self, runtime: Program, memory: Memory) -> None:
        self.device_works = False
        self.spent = 0  # ns of this process's time
        self.runtime = runtime
        self.memory = memory
        self._clocks = clocks = runtime.clocks
        self._free = FreeBlocks(clocks)
        self._findings = Findings()
        self._declared = Declared(self)
        self._recordings: dict[
            int, FootprintRecording
        ] = {}  # by id of a graph's capture, which the recording keeps alive
        self._recording: FootprintRecording | None = None
        self._lazy: WeakSet[Scattered] = WeakSet()
        self._pools: list[Pool] = []

    # ---- what happens --------------------------------------------------------------------------------------

    def launch(self, op: str) -> IssuedOp:
        """An operation of the current stream, issued from the source line that launched last."""
        return self._launched(op, self.runtime.sites.last)

    def launch_here(self, op: str) -> IssuedOp:
        """As ``launch``, for an operation that has yet to tell its source line."""
        return self._launched(op, self.runtime.sites.here())

    def _launched(self, op: str, site: int) -> IssuedOp:
        actor = self.runtime.stream.id + 1
        seq = self._clocks.launch(actor)
        return IssuedOp(actor, seq, self._clocks.of(actor), op, site)

    def read(self, launch: IssuedOp, tensor: torch.Tensor) -> None:
        self._device(launch, tensor, write=False)

    def write(self, launch: IssuedOp, tensor: torch.Tensor) -> None:
        """``announce`` has gone before, unless the memory is new."""
        self._device(launch, tensor, write=True)

    def _device(self, launch: IssuedOp, tensor: torch.Tensor, *, write: bool) -> None:
        block = self.block(tensor)
        span = self.memory.span(tensor)
        if span.end > span.start:
            if write and block.shadow.owner is UNKNOWN:
                block.shadow.owner = Owner("", launch.op, launch.site)
            self.note(launch, block.shadow, span, write=write)

    def announce(self, tensor: torch.Tensor) -> None:
        """The tensor's values are about to be written."""
        if self._recording is None:
            self.block(tensor).shadow.freeze()

    def host_memory(self, launch: IssuedOp, tensor: torch.Tensor, *, write: bool) -> None:
        """A copy or kernel of the device touches host memory. Only pinned memory can still be touched later."""
        if self.memory.pinned(tensor) and tensor.numel():
            self.note(launch, self._pinned(tensor), span(tensor), write=write)

    def host_access(self, op: str, tensor: torch.Tensor, *, write: bool) -> None:
        """The host itself looks at, or changes, pinned memory."""
        if self.device_works:
            return
        shadow = getattr(tensor.untyped_storage(), _SHADOW, None)
        if shadow is not None:
            host = self._clocks.host
            clock = self._clocks.of(host)
            launch = IssuedOp(host, clock[host], clock, op, self.runtime.sites.here())
            for entry in shadow.unordered(launch, span(tensor), write=write):
                self._findings.add(shadow, entry, launch, write=write)

    @contextmanager
    def device_at_work(self) -> Iterator[None]:
        """What a copy or kernel does to pinned memory meanwhile is the device's, though this process computes it."""
        before, self.device_works = self.device_works, True
        try:
            yield
        finally:
            self.device_works = before

    def kernel(self, launch: IssuedOp, kernel: Kernel, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """A custom kernel, by its own footprint."""
        if self._recording is not None:
            self._recording.kernel(kernel, args, named)
            return
        for shadow, footprint, write in self._declared.accesses(kernel, args, named):
            self.note(launch, shadow, footprint, write=write)

    def indexed(
        self, launch: IssuedOp, tensor: torch.Tensor, indices: Sequence[torch.Tensor], *, write: bool
    ) -> None:
        """``tensor[i, j, ...]``, by indices of the first dimensions."""
        block, held = self.block(tensor), self.memory.held
        if self._recording is not None:  # whose values are not there yet
            self.note(launch, block.shadow, ByteSpan(0, block.shadow.size), write=write)
            return
        footprint = Scattered(Indexed(Grid.of(held(tensor)), [held(index) for index in indices]))
        self.lend(footprint, indices)
        self.note(launch, block.shadow, footprint, write=write)

    def note(self, launch: IssuedOp, shadow: Shadow, footprint: Footprint, *, write: bool) -> None:
        """Compare an access with those before it, and remember it."""
        if self._recording is not None:
            self._recording.touch(shadow, footprint, write=write)
            return
        if shadow.pool is not None:
            shadow.pool.note(launch, write=write)
        for entry in shadow.unordered(launch, footprint, write=write):
            self._findings.add(shadow, entry, launch, write=write)
        if shadow.add(launch, footprint, write=write):
            shadow.prune(self._clocks.known())

    # ---- graphs --------------------------------------------------------------------------------------------

    def capturing(self, capture: object | None) -> None:
        """From now on operations are nodes of that graph; None: they are operations again."""
        self._recording = None
        if capture is not None:
            self._recording = self._recordings[id(capture)] = FootprintRecording(capture, self._declared)

    @contextmanager
    def replaying(self, capture: object) -> Iterator[None]:
        """Everything that the graph touches, at once. What its nodes touch may follow from values that others of its
        nodes have computed: it is told afterwards."""
        begin = perf_counter_ns()
        recording = self._recordings[id(capture)]
        for shadow in recording.written():
            shadow.freeze()
        self.spent += perf_counter_ns() - begin
        with self.device_at_work():
            yield
        begin, launch = perf_counter_ns(), self.launch_here("graph")
        for by, (shadow, footprint, write) in recording.accesses(launch):
            self.note(by, shadow, footprint, write=write)
        for write, (shadow, entry) in recording.scattered(launch, self._clocks.known):
            self._findings.add(shadow, entry, launch, write=write)
        self.spent += perf_counter_ns() - begin

    # ---- memory --------------------------------------------------------------------------------------------

    def made(self, tensor: torch.Tensor) -> None:
        """New memory, or a view, and nothing launched."""
        self.block(tensor)

    def sent(self, tensor: torch.Tensor) -> None:
        """The current stream's engine carries the values away."""
        self.read(self.launch_here("send"), tensor)

    def generated(self, op: str, tensor: torch.Tensor) -> None:
        """New memory, written by a kernel."""
        self.write(self.launch(op), tensor)

    def block(self, tensor: torch.Tensor) -> Block:
        """The memory of a device tensor, shared with its views; allocated now if it is met for the first time."""
        return self.memory.block(tensor) or self._adopt(tensor)

    def _adopt(self, tensor: torch.Tensor) -> Block:
        storage = self.memory.held(tensor).untyped_storage()
        shadow: Shadow | None = getattr(storage, _SHADOW, None)
        block = None if shadow is None or shadow.block is None else shadow.block()
        if block is None:
            actor, size = self.runtime.stream.id + 1, storage.nbytes()
            shadow = Shadow(UNKNOWN, size)
            if self._recording is None:
                shadow.inherit(self._free.take(actor, size))
            block = Block(shadow, actor, self)
            shadow.block, shadow.private = ref(block), self._recording is not None
            setattr(storage, _SHADOW, shadow)
        self.memory.keep(tensor, block)
        return block

    def freed(self, block: Block) -> None:
        """The last view of a block is gone. A graph's own memory is never re-issued."""
        if not block.shadow.private:
            self._free.give(block.actor, block.shadow, block.recorded)

    def record_stream(self, tensor: torch.Tensor, queue: int) -> None:
        self.block(tensor).recorded.add(queue + 1)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """What findings call the tensor's memory."""
        assert self.memory.mine(tensor)
        shadow = self.block(tensor).shadow
        shadow.owner = Owner(name, "", self.runtime.sites.last)
        shadow.pool = Pool(name)
        self._pools.append(shadow.pool)

    def lend(self, footprint: Scattered, tensors: Iterable[torch.Tensor]) -> None:
        """The footprint follows from the values of these tensors."""
        if not self.memory.lasting:
            footprint.freeze()
            return
        self._lazy.add(footprint)
        for tensor in tensors:
            self.block(tensor).shadow.lend(footprint)

    def shadow_of(self, argument: object) -> Shadow | None:
        """Of a kernel's argument; None for what is no memory that others touch."""
        if not isinstance(argument, torch.Tensor):
            return None
        if self.memory.mine(argument):
            return self.block(argument).shadow
        return self._pinned(argument) if self.memory.pinned(argument) else None

    def _pinned(self, tensor: torch.Tensor) -> Shadow:
        storage = tensor.untyped_storage()
        shadow: Shadow | None = getattr(storage, _SHADOW, None)
        if shadow is None:
            owner = Owner("pinned memory", "", self.runtime.sites.last)
            shadow = Shadow(owner, storage.nbytes(), pinned=True)
            setattr(storage, _SHADOW, shadow)
        return shadow

    # ---- the end -------------------------------------------------------------------------------------------

    def found(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[FoundHazard, ...]:
        return self._findings.named(sites, streams)

    def unread(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[FoundHazard, ...]:
        return unread(self._pools, sites, streams)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Forget every tensor in the end."""
        try:
            yield
        finally:
            for footprint in list(self._lazy):
                footprint.drop()
            self._recordings.clear()
