"""Compares every access with the earlier ones: first their order, and only where that is missing their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from ...platform.machine import VisitingKernel, Watcher
from ...record.result import HazardFinding, OrderingRow
from ...record.timeline import NO_SITE, Site
from .blocks import SHADOW, DeviceMemory, HostProgram, ShadowTable
from .declared import DeclaredFootprints
from .findings import Findings, unread
from .footprints import ByteSpan, Footprint, span, visited
from .graphs import GraphFootprint
from .probes import ProbedClocks
from .shadow import UNWRITTEN, Block, IssuedOp, MemoryOrigin, NamedMemory, ShadowMemory

if TYPE_CHECKING:
    from ....sched.kernels.declare import Kernel


class HazardChecker(Watcher):
    """Receives every operation in the order in which the host issues them."""

    def __init__(self, program: HostProgram, memory: DeviceMemory) -> None:
        self.spent = 0
        self.memory = memory
        self._program = program
        self._clocks = program.clocks
        self._probes = self._clocks if isinstance(self._clocks, ProbedClocks) else None
        self._table = ShadowTable(program, memory)
        self._findings = Findings()
        self._declared = DeclaredFootprints(self._table)
        # Of each part between events, by id of the graph's capture, which the footprint keeps alive.
        self._graphs: dict[int, list[GraphFootprint]] = {}
        self._capturing: GraphFootprint | None = None
        self._named: list[NamedMemory] = []
        self._fused: IssuedOp | None = None

    # ---- accesses ------------------------------------------------------------------------------------------

    def launch(self, op: str) -> IssuedOp:
        """An operation of the current stream, issued from the source line of the last call of the device."""
        if self._fused is not None:
            return self._fused
        program, clocks = self._program, self._clocks
        actor = program.stream.id + 1
        return IssuedOp(actor, clocks.launch(actor), clocks.of(actor), op, program.sites.last)

    def launch_here(self, op: str) -> IssuedOp:
        """An operation of the current stream before its own call of the device: looks up the source line."""
        self._program.sites.here()
        return self.launch(op)

    def access(self, launch: IssuedOp, tensor: torch.Tensor, *, write: bool) -> None:
        """An access to device memory, or to pinned memory, which can still be accessed later. Before a write to memory
        that is not new, ``announce`` has been called."""
        shadow, part = self._table.part(tensor)
        if part.end > part.start:
            if write and shadow.origin is UNWRITTEN:
                shadow.origin = MemoryOrigin("", launch.op, launch.site)
            self._add(launch, shadow, part, write)

    def accesses(self, launch: IssuedOp, values: Iterable[Any], *, write: bool) -> None:
        """``access`` of the device tensors among values and lists of values."""
        for value in values:
            if self.memory.on_device(value):
                self.access(launch, value, write=write)
            elif isinstance(value, (list, tuple)):
                self.accesses(launch, value, write=write)

    def announce(self, target: Any) -> None:
        """The values of the tensor, or of the device tensors in a list, are about to be written."""
        if self.memory.on_device(target):
            if self._capturing is None:
                self._table.block(target).shadow.freeze()
        elif isinstance(target, (list, tuple)):
            for each in target:
                self.announce(each)

    def host_access(self, op: str, tensor: torch.Tensor, *, write: bool) -> None:
        shadow = getattr(tensor.untyped_storage(), SHADOW, None)
        if shadow is not None:
            host = self._clocks.host
            clock = self._clocks.of(host)
            launch = IssuedOp(host, clock[host], clock, op, self._program.sites.here())
            if not shadow.settled(host, self._clocks.floor(host), write=write):
                self._compare(launch, shadow, span(tensor), write)

    @contextmanager
    def device_at_work(self) -> Iterator[None]:
        """``device_works`` for the duration of the block."""
        before, self.device_works = self.device_works, True
        try:
            yield
        finally:
            self.device_works = before

    @contextmanager
    def visiting(self, kernel: VisitingKernel, arguments: Sequence[torch.Tensor]) -> Iterator[None]:
        begin = perf_counter_ns()
        for tensor in arguments:
            self._table.part(tensor)
        if self._capturing is None:
            self._freeze(kernel)
        self.spent += perf_counter_ns() - begin
        with self.device_at_work():
            yield
        begin, launch = perf_counter_ns(), self.launch(kernel.name)
        if self._capturing is not None:
            self._capturing.visiting.append(kernel)
        else:
            self._visited(launch, kernel)
        self.spent += perf_counter_ns() - begin

    def _freeze(self, kernel: VisitingKernel) -> None:
        """Any memory that the kernel may touch may be written."""
        for storage in kernel.storages():
            shadow = getattr(storage, SHADOW, None)
            if shadow is not None:
                shadow.freeze()

    def _visited(self, launch: IssuedOp, kernel: VisitingKernel) -> None:
        for access in kernel.accesses():
            shadow: ShadowMemory | None = getattr(access.storage, SHADOW, None)
            if shadow is not None:
                if access.write and shadow.origin is UNWRITTEN:
                    shadow.origin = MemoryOrigin("", launch.op, launch.site)
                self._add(launch, shadow, visited(access), access.write)

    @contextmanager
    def fused(self, op: str, results: Sequence[torch.Tensor]) -> Iterator[None]:
        """Memory that is allocated inside is not the device's, except that of the results."""
        self._fused = launch = self.launch_here(op)
        try:
            with self._table.temporary() as made:
                yield
        finally:
            self._fused = None
        for tensor in results:
            if self._table.issued(tensor, made):
                self.access(launch, tensor, write=True)

    def kernel(self, launch: IssuedOp, kernel: Kernel, args: Sequence[Any]) -> None:
        """A custom kernel, by the footprint that it declares."""
        if self._capturing is not None:
            self._capturing.kernel(kernel, args)
            return
        for shadow, footprint, write in self._declared.accesses(kernel, args):
            self._add(launch, shadow, footprint, write)

    def indexed(
        self, launch: IssuedOp, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], *, write: bool
    ) -> None:
        """``tensor[i, j, ...]``, by indices of the first dimensions; None selects all of a dimension."""
        shadow = self._table.block(tensor).shadow
        if self._capturing is not None:  # the indices have no values yet
            self._add(launch, shadow, ByteSpan(0, shadow.size), write)
        else:
            self._add(launch, shadow, self._declared.indexed(tensor, indices), write)

    def _add(self, launch: IssuedOp, shadow: ShadowMemory, footprint: Footprint, write: bool) -> None:
        """Compare an access with the earlier ones, and add it to them."""
        if self._capturing is not None:
            self._capturing.touch(shadow, footprint, write=write)
            return
        if shadow.named is not None:
            shadow.named.note(launch, write=write)
        actor = launch.actor
        ordered = shadow.ordered if write else shadow.ordered_reads
        if not ordered >> actor & 1 and not shadow.settled(actor, self._clocks.floor(actor), write=write):
            self._compare(launch, shadow, footprint, write)
        if shadow.add(launch, footprint, write):
            shadow.prune(self._clocks.known())

    def _compare(self, launch: IssuedOp, shadow: ShadowMemory, footprint: Footprint, write: bool) -> None:
        for earlier in shadow.unordered(launch, footprint, write=write):
            self._findings.add(shadow, earlier, launch, self._program.sites, write=write)
        if self._probes is not None:
            self._probes.compare(shadow, launch, footprint, write=write)

    # ---- graphs --------------------------------------------------------------------------------------------

    def capturing(self, capture: object | None) -> None:
        self._capturing, self._table.capturing = None, capture is not None
        if capture is not None:
            self._capturing = GraphFootprint(capture, self._declared)
            self._graphs[id(capture)] = [self._capturing]

    def marked(self) -> None:
        assert self._capturing is not None
        parts = self._graphs[id(self._capturing.capture)]
        self._capturing = GraphFootprint(self._capturing.capture, self._declared)
        parts.append(self._capturing)

    @contextmanager
    def replaying(self, capture: object) -> Iterator[None]:
        """All accesses of a part of the graph count as one operation. They are compared after the computation, since
        what a node touches may follow from values that other nodes compute."""
        begin, launch, parts = perf_counter_ns(), self.launch_here("graph"), self._graphs[id(capture)]
        for part in parts:
            for shadow in list(part.followed):
                shadow.freeze()
            for kernel in part.visiting:
                self._freeze(kernel)
        self.spent += perf_counter_ns() - begin
        with self.device_at_work():
            yield
        begin = perf_counter_ns()
        for k, part in enumerate(parts):
            operation = replace(launch, seq=launch.seq + k) if k else launch
            part.spans(operation, self._clocks, self._add)
            part.scattered(operation, self._clocks, self._compare)
            for kernel in part.visiting:
                self._visited(operation, kernel)
        self.spent += perf_counter_ns() - begin

    # ---- memory --------------------------------------------------------------------------------------------

    def made(self, tensor: torch.Tensor) -> None:
        self._table.block(tensor)

    def moved(self, tensor: torch.Tensor, block: Block, size: int) -> None:
        launch, copied, block = self.launch("resize_"), ByteSpan(0, size), block or self._table.block(tensor)
        self._add(launch, block.shadow, copied, write=False)
        self._table.reissue(block, tensor)
        self._add(launch, block.shadow, copied, write=True)

    def sent(self, tensor: torch.Tensor) -> None:
        self.access(self.launch_here("send"), tensor, write=False)

    def generated(self, op: str, tensor: torch.Tensor) -> None:
        self.access(self.launch(op), tensor, write=True)

    def record_stream(self, tensor: torch.Tensor, queue: int) -> None:
        place = NO_SITE if self._probes is None else self._probes.reach("reference")
        self._table.block(tensor).recorded[queue + 1] = place

    def name(self, tensor: torch.Tensor, name: str) -> None:
        assert self.memory.on_device(tensor)
        shadow = self._table.block(tensor).shadow
        shadow.origin = MemoryOrigin(name, "", self._program.sites.last)
        shadow.named = NamedMemory(name)
        shadow.mark_uncompared()
        self._named.append(shadow.named)

    # ---- reports -------------------------------------------------------------------------------------------

    def found(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[HazardFinding, ...]:
        return self._findings.named(sites, {self._clocks.host - 1: "host", **streams})

    def unread(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[HazardFinding, ...]:
        return unread(self._named, sites, streams)  # the host writes none of this memory

    def places(self) -> tuple[OrderingRow, ...]:
        return () if self._probes is None else self._probes.places()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Releases all tensors in the end."""
        try:
            yield
        finally:
            self._table.release()
            self._graphs.clear()
