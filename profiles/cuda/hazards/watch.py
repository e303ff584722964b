"""Feeds the hazard checker from torch's dispatch and from the calls of streams, events and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch

from ...record.timeline import Site
from ...vgpu.hazards import HazardChecker
from ...vgpu.hazards.footprints import ByteSpan, span
from ...vgpu.hazards.ops import host_accesses
from ...vgpu.hazards.shadow import Block
from ...vgpu.patching import Function, Target, replaced
from ..dispatch_counts import CopyRules
from .operators import Operators, ProgramOrder

_BLOCK = "_schedbench_block"  # attribute of a storage's Python object, which exists as long as the storage


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class StorageMemory:
    """Tensors of the device type ``type``. No references to tensors are kept, since they would keep blocks from being
    freed. ``real`` returns the tensor that has the storage, if that is another one."""

    type: str
    real: Callable[[torch.Tensor], torch.Tensor] = itself
    lasting: bool = False

    def on_device(self, value: object) -> TypeGuard[torch.Tensor]:
        return isinstance(value, torch.Tensor) and value.device.type == self.type

    def pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.real(tensor)

    def block(self, tensor: torch.Tensor) -> Block | None:
        return getattr(self.real(tensor).untyped_storage(), _BLOCK, None)

    def keep(self, tensor: torch.Tensor, block: Block) -> None:
        setattr(self.real(tensor).untyped_storage(), _BLOCK, block)

    def span(self, tensor: torch.Tensor) -> ByteSpan:
        return span(self.real(tensor))


@dataclass(frozen=True, slots=True)
class WatchedDevice:
    """``inline`` is the most bytes that a pageable upload may have without waiting. ``real`` returns the tensor that
    has the storage of a tensor."""

    module: Any  # torch.cuda or a module like it
    type: str
    inline: int
    tensors: Any = torch.Tensor  # the class that has record_stream
    real: Callable[[torch.Tensor], torch.Tensor] = itself


@dataclass(frozen=True, slots=True)
class HazardWatch:
    """A checker, and the names behind the small integers of its records."""

    checker: HazardChecker
    order: ProgramOrder
    operators: Operators = field(repr=False)

    @property
    def sites(self) -> Sequence[Site]:
        return self.order.sites.resolved()

    @property
    def streams(self) -> dict[int, str]:
        return self.order.streams

    def announce(self, name: str, stream: Any) -> None:
        self.order.streams[self.order.number(stream)] = name

    def peek(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values on the host, hidden from the checker."""
        with self.operators.excluded():
            return tensor.cpu()


@contextmanager
def watching(device: WatchedDevice, watch: Sequence[Path]) -> Iterator[HazardWatch]:
    """Check all that this thread does on the device in this block. Source lines of ``watch`` are recorded. The
    checker's own reads make the host wait, so times mean nothing."""
    order = ProgramOrder(device.module, watch)
    checker = HazardChecker(order, StorageMemory(device.type, device.real))
    operators = Operators(checker, order, CopyRules(device.type, device.inline))
    calls = _Calls(checker, order, operators)
    with (
        checker.listening(),
        order.installed(),
        replaced(list(calls.targets(device)), calls.wrap),
        host_accesses(lambda: checker, checker.memory),
        operators,
    ):
        yield HazardWatch(checker, order, operators)


@dataclass(frozen=True, slots=True)
class _Calls:
    """The calls that are neither operators nor order streams."""

    checker: HazardChecker
    order: ProgramOrder
    operators: Operators

    def targets(self, device: WatchedDevice) -> Iterator[Target]:
        yield Target(device.tensors, "record_stream", "record_stream")
        for name in ("capture_begin", "capture_end", "replay"):
            yield Target(device.module.CUDAGraph, name, name)

    def wrap(self, target: Target, function: Function) -> Function:
        around: Callable[..., AbstractContextManager[None]] = getattr(self, f"_{target.call}")

        def wrapped(*args: Any, **kwargs: Any) -> None:
            with around(*args, **kwargs):
                function(*args, **kwargs)

        return wrapped

    @contextmanager
    def _record_stream(self, tensor: torch.Tensor, stream: Any) -> Iterator[None]:
        self.checker.record_stream(tensor, self.order.number(stream))
        yield

    @contextmanager
    def _capture_begin(self, graph: Any, *_: Any, **__: Any) -> Iterator[None]:
        yield
        self.order.capturing = True
        self.checker.capturing(graph)

    @contextmanager
    def _capture_end(self, graph: Any) -> Iterator[None]:  # noqa: ARG002
        self.order.capturing = False
        self.checker.capturing(None)
        yield

    @contextmanager
    def _replay(self, graph: Any) -> Iterator[None]:
        with self.operators.excluded(), self.checker.replaying(graph):
            yield
