"""A checker that is fed from inside the program: torch's dispatch, and the calls of streams, events and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...record.timeline import Site
from ...vgpu.hazards.checker import Checker
from ...vgpu.hazards.host import watched as host_watched
from ..dispatch_counts import Sees
from ..patching import Function, Target, replaced
from .memory import StorageMemory, itself
from .operators import Operators
from .order import ProgramOrder


@dataclass(frozen=True, slots=True)
class Watched:
    """A device as the program knows it. ``inline``: bytes that a pageable upload may have without waiting."""

    module: Any  # torch.cuda or its like
    type: str
    inline: int
    tensors: Any = torch.Tensor  # the class whose record_stream is called
    real: Callable[[torch.Tensor], torch.Tensor] = itself


@dataclass(frozen=True, slots=True)
class Inside:
    """What is known so far. Names of records, as a run asks for them."""

    checker: Checker
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
        """Its values on the host, unnoticed."""
        with self.operators.excluded():
            return tensor.cpu()


@contextmanager
def watching(device: Watched, watch: Sequence[Path]) -> Iterator[Inside]:
    """Everything that this thread does on the device is followed in this block; lines of ``watch`` are recorded. What
    the checker reads for itself makes the host wait: times mean nothing."""
    order = ProgramOrder(device.module, watch)
    checker = Checker(order, StorageMemory(device.type, device.real))
    operators = Operators(checker, order, Sees(device.type, device.inline))
    calls = _Calls(checker, order, operators)
    with (
        checker.listening(),
        order.installed(),
        replaced(list(calls.targets(device)), calls.heard),
        host_watched(lambda: checker, checker.memory),
        operators,
    ):
        yield Inside(checker, order, operators)


@dataclass(frozen=True, slots=True)
class _Calls:
    """Calls that are neither an operator's nor about order."""

    checker: Checker
    order: ProgramOrder
    operators: Operators

    def targets(self, device: Watched) -> Iterator[Target]:
        yield Target(device.tensors, "record_stream", "record_stream")
        for name in ("capture_begin", "capture_end", "replay"):
            yield Target(device.module.CUDAGraph, name, name)

    def heard(self, target: Target, function: Function) -> Function:
        make: Callable[[Function], Function] = getattr(self, f"_{target.call}")
        return make(function)

    def _record_stream(self, function: Function) -> Function:
        def recording(tensor: torch.Tensor, stream: Any) -> None:
            self.checker.record_stream(tensor, self.order.number(stream))
            function(tensor, stream)

        return recording

    def _capture_begin(self, function: Function) -> Function:
        def beginning(graph: Any, *args: Any, **kwargs: Any) -> None:
            function(graph, *args, **kwargs)
            self.order.capturing = True
            self.checker.capturing(graph)

        return beginning

    def _capture_end(self, function: Function) -> Function:
        def ending(graph: Any) -> None:
            self.order.capturing = False
            self.checker.capturing(None)
            function(graph)

        return ending

    def _replay(self, function: Function) -> Function:
        def replaying(graph: Any) -> None:
            with self.operators.excluded(), self.checker.replaying(graph):
                function(graph)

        return replaying
