"""The shadow memory of a device: from the allocation of a block to the next allocation of the same memory.

The host frees a block when its last view dies. The block returns to the stream that it was allocated on and may be
issued again there at once, whatever other streams still do with it, unless ``record_stream`` named them. The accesses
that are pending at that point are kept and compared with those of the block's next owner.

The real allocator splits and joins the blocks of a pool, so that freed memory may become part of the next allocation
of any size in it. Here it always does: where the heap's layout would decide, the worst case is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard
from weakref import ref

import torch

from ..sites import Sites
from .clocks import Clock, VectorClocks
from .footprints import ByteSpan, Span, ValueSource, span
from .shadow import UNWRITTEN, Block, MemoryAccess, MemoryOrigin, ShadowMemory

SMALL_BYTES = 1 << 20  # bytes; torch keeps a pool of its own for blocks that are no larger

SHADOW = "_vgpu_shadow"  # attribute of a storage's Python object, which exists as long as the storage


class DeviceMemory(Protocol):
    """Reads the tensors of a device without the program noticing it."""

    @property
    def lasting(self) -> bool:
        """Whether values may be kept and read later without keeping device memory allocated."""

    def on_device(self, value: object) -> TypeGuard[torch.Tensor]:
        """Whether the value is a tensor on the device."""

    def pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is in memory that the device may access at any time."""

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in the same geometry, as an argument for a kernel's footprint."""

    def block(self, tensor: torch.Tensor) -> Block | None:
        """The tensor's block, if ``keep`` was called."""

    def keep(self, tensor: torch.Tensor, block: Block, span: Span) -> None:
        """Keep the block alive for as long as it can be reached through this tensor or its views."""

    def span(self, tensor: torch.Tensor) -> Span | None:
        """The tensor's bytes of its block, if ``keep`` was called since it has this geometry."""


def device_tensors(memory: DeviceMemory, values: Iterable[Any]) -> list[torch.Tensor]:
    """The device tensors among values and lists of values."""
    found: list[torch.Tensor] = []
    for value in values:
        if memory.on_device(value):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += device_tensors(memory, value)
    return found


class StreamNumber(Protocol):
    @property
    def id(self) -> int: ...


class HostProgram(Protocol):
    """The program that issues operations: its clocks, its source lines and its current stream."""

    @property
    def clocks(self) -> VectorClocks: ...

    @property
    def sites(self) -> Sites: ...

    @property
    def stream(self) -> StreamNumber: ...


class FreeBlocks:
    """Pending accesses of freed blocks, by stream and by whether the block is small. ``_ordered_by_places`` has those
    that would be pending without one of the places that are probed, and are not."""

    def __init__(self, clocks: VectorClocks) -> None:
        self._clocks = clocks
        self._pending: dict[tuple[int, bool], list[Sequence[MemoryAccess]]] = {}
        self._ordered_by_places: dict[tuple[int, bool], list[Sequence[MemoryAccess]]] = {}

    def take(self, actor: int, size: int) -> Sequence[MemoryAccess]:
        """The accesses that are pending in the block that is issued on that stream."""
        key = (actor, size <= SMALL_BYTES)
        ordered, pending = self._ordered_by_places.get(key), self._pending.get(key)
        if not (ordered or pending):
            return ()
        found = [
            *_last_after(self._clocks.floor(actor), ordered or []),
            *_last_after(self._clocks.of(actor), pending or []),
        ]
        return [access._replace(footprint=ByteSpan(0, size)) for access in found]

    def give(self, actor: int, shadow: ShadowMemory, recorded: Mapping[int, int]) -> None:
        """The host frees a block of that stream; re-use waits for the ``recorded`` streams."""
        found = list(shadow.after(actor, self._clocks.floor(actor), write=True))
        if not found:
            return
        clock, key = self._clocks.of(actor), (actor, shadow.size <= SMALL_BYTES)
        accesses = [
            access._replace(
                freed_origin=access.freed_origin or shadow.origin,
                kept_by=recorded.get(access.launch.actor, access.kept_by),
            )
            for access in found
        ]
        pending = [a for a in accesses if a.kept_by is None and a.launch.seq > clock[a.launch.actor]]
        ordered = [a for a in accesses if (a.kept_by is None) is (a.launch.seq <= clock[a.launch.actor])]
        if pending:
            self._pending.setdefault(key, []).append(pending)
        if ordered:
            self._ordered_by_places.setdefault(key, []).append(ordered)


def _last_after(clock: Clock, blocks: list[Sequence[MemoryAccess]]) -> Sequence[MemoryAccess]:
    """The accesses after the clock of the block that was freed last; later blocks without any are dropped."""
    while blocks:
        pending = [access for access in blocks.pop() if access.launch.seq > clock[access.launch.actor]]
        if pending:
            return pending
    return ()


NO_MEMORY, _NOTHING = ShadowMemory(UNWRITTEN, 0), ByteSpan(0, 0)


class ShadowTable:
    """The blocks of device tensors, and the shadow memory of blocks and of pinned host memory.

    ``capturing``: a graph is being captured, so that new memory is the graph's own, which is never issued again.
    """

    def __init__(self, program: HostProgram, memory: DeviceMemory) -> None:
        self.memory = memory
        self.capturing = False
        self._known, self._span = memory.block, memory.span
        self._temporary: set[ShadowMemory] | None = None
        self._program = program
        self._free = FreeBlocks(program.clocks)
        # Not a WeakSet, whose methods are written in Python.
        self._sources = set[ref[ValueSource]]()

    def block(self, tensor: torch.Tensor) -> Block:
        """The memory of a device tensor, shared with its views; allocated now if it is new to the table."""
        return self._known(tensor) or self._adopt(tensor)[0]

    def _adopt(self, tensor: torch.Tensor) -> tuple[Block, Span]:
        held = self.memory.held(tensor)
        storage = held.untyped_storage()
        shadow: ShadowMemory | None = getattr(storage, SHADOW, None)
        block = None if shadow is None or shadow.block is None else shadow.block()
        if block is None:
            # Pinned memory of the host, which kernels access by its address, is never issued to another owner.
            shadow = self.pinned(held) if self.memory.pinned(held) else self._issue(storage)
            block = Block(shadow, self._program.stream.id + 1, self._freed)
            shadow.block = ref(block)
        part = span(held)
        self.memory.keep(tensor, block, part)
        return block, part

    def reissue(self, block: Block, tensor: torch.Tensor) -> None:
        """The tensor and all views of it have new memory in place of the block's, which is freed."""
        held = self.memory.held(tensor)
        shadow = self._issue(held.untyped_storage())
        self._freed(block)
        block.shadow, block.actor, block.recorded = shadow, self._program.stream.id + 1, {}
        shadow.block = ref(block)
        self.memory.keep(tensor, block, span(held))

    def _issue(self, storage: torch.UntypedStorage) -> ShadowMemory:
        actor, size = self._program.stream.id + 1, storage.nbytes()
        shadow = ShadowMemory(UNWRITTEN, size)
        shadow.private = self.capturing or self._temporary is not None
        if not shadow.private and (pending := self._free.take(actor, size)):
            shadow.inherit(pending)
        if self._temporary is not None:
            self._temporary.add(shadow)
        setattr(storage, SHADOW, shadow)
        return shadow

    def _freed(self, block: Block) -> None:
        shadow, actor = block.shadow, block.actor
        if not (shadow.ordered >> actor & 1 or shadow.private or shadow.pinned):
            self._free.give(actor, shadow, block.recorded)

    @contextmanager
    def temporary(self) -> Iterator[set[ShadowMemory]]:
        """Memory that is allocated inside is not the device's. Yields it."""
        self._temporary = made = set[ShadowMemory]()
        try:
            yield made
        finally:
            self._temporary = None

    def issued(self, tensor: torch.Tensor, made: set[ShadowMemory]) -> bool:
        """Make temporary memory of ``made`` the device's; returns whether the tensor's memory was such."""
        block = self.block(tensor)
        if block.shadow not in made:
            return False
        made.remove(block.shadow)
        block.shadow.private = self.capturing
        if not self.capturing:
            block.shadow.inherit(self._free.take(block.actor, block.shadow.size))
        return True

    def pinned(self, tensor: torch.Tensor) -> ShadowMemory:
        """The shadow memory of a tensor in pinned host memory."""
        storage = tensor.untyped_storage()
        shadow: ShadowMemory | None = getattr(storage, SHADOW, None)
        if shadow is None:
            origin = MemoryOrigin("pinned memory", "", self._program.sites.last)
            shadow = ShadowMemory(origin, storage.nbytes(), pinned=True)
            setattr(storage, SHADOW, shadow)
        return shadow

    def part(self, argument: object) -> tuple[ShadowMemory, Span]:
        """The shadow memory of a tensor in device or pinned memory, and the tensor's part of it; an empty part of none
        for what is neither."""
        memory = self.memory
        if memory.on_device(argument):
            block, part = self._known(argument), self._span(argument)
            if block is None or part is None:
                block, part = self._adopt(argument)
            return block.shadow, part
        if isinstance(argument, torch.Tensor) and memory.pinned(argument):
            return self.pinned(argument), span(argument)
        return NO_MEMORY, _NOTHING

    def depend(self, source: ValueSource, values: Iterable[ShadowMemory]) -> None:
        """The source reads the values of these storages."""
        if not self.memory.lasting:
            source.freeze()
            return
        weak = ref(source, self._sources.discard)
        self._sources.add(weak)
        for shadow in values:
            shadow.add_dependent(weak)

    def release(self) -> None:
        """Release all tensors that footprints follow from."""
        for weak in list(self._sources):
            if (source := weak()) is not None:
                source.drop()
