"""Copies, both sides: device memory, and host memory that the device touches later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from ..copies import CopyHandlers
from ..tensor import DeviceTensor
from .shadows import IssuedOp

if TYPE_CHECKING:
    from ..gpu import VirtualGpu
    from .checker import Checker


class WatchedCopies(CopyHandlers):
    """A copy takes its place in the stream before it is made, since making it may wait for it."""

    def __init__(self, gpu: VirtualGpu, checker: Checker) -> None:
        super().__init__(gpu)
        self._checker = checker

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
        begin, checker = perf_counter_ns(), self._checker
        launch = checker.launch_here(_name(target, source))
        side(self._checker, launch, source, write=False)
        if type(target) is DeviceTensor:
            checker.announce(target)
        side(self._checker, launch, target, write=True)
        checker.spent += perf_counter_ns() - begin
        with checker.device_at_work():
            super().copy(target, source, non_blocking=non_blocking)

    def clone(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeviceTensor:
        launch = self._checker.launch_here("clone")
        result = super().clone(args, kwargs)
        side(self._checker, launch, args[0], write=False)
        side(self._checker, launch, result, write=True)
        return result

    def to_copy(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        launch = self._checker.launch_here("_to_copy" if kwargs.get("device") is None else "copy d2h")
        result = super().to_copy(args, kwargs)
        begin = perf_counter_ns()
        if not result.is_meta:
            side(self._checker, launch, args[0], write=False)
            side(self._checker, launch, result, write=True)
        self._checker.spent += perf_counter_ns() - begin
        return result


def side(checker: Checker, launch: IssuedOp, tensor: torch.Tensor, *, write: bool) -> None:
    """One side of a copy, wherever it lies."""
    if not checker.memory.mine(tensor):
        checker.host_memory(launch, tensor, write=write)
    elif write:
        checker.write(launch, tensor)
    else:
        checker.read(launch, tensor)


def _name(target: torch.Tensor, source: torch.Tensor) -> str:
    if type(source) is not DeviceTensor:
        return "copy h2d"
    return "copy d2d" if type(target) is DeviceTensor else "copy d2h"
