"""The parts of a virtual GPU that report to the hazard checker: its API, its copies and its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from time import perf_counter_ns
from typing import Any, TypeGuard

import torch

from .copies import CopyHandlers
from .device import VirtualGpu
from .engine import EventRecording, PeerEventRecording, StreamQueue
from .hazards.checker import HazardChecker
from .hazards.footprints import Span
from .hazards.probes import ProbedClocks
from .hazards.shadow import Block
from .runtime import Direction, Runtime
from .tensor import DeviceTensor, is_pinned


class WatchedRuntime(Runtime):
    """Keeps vector clocks: every call that orders operations orders them in the clocks, too."""

    clocks: ProbedClocks

    def copy(self, direction: Direction, size: int, *, pinned: bool, blocking: bool) -> bool:
        waits = super().copy(direction, size, pinned=pinned, blocking=blocking)
        if waits:
            self._synchronized(self.stream)
        return waits

    def synchronize(self, stream: StreamQueue, *, site: int | None = None) -> None:
        super().synchronize(stream, site=site)
        place = self.clocks.reach("wait", self.sites.last) if site is None else None  # a part of a copy
        self._synchronized(stream, place)

    def synchronize_event(self, stream: StreamQueue, recording: EventRecording) -> None:
        super().synchronize_event(stream, recording)
        self.clocks.synchronize(recording.clock, self.clocks.reach("wait", self.sites.last))

    def synchronize_device(self) -> None:
        super().synchronize_device()
        self.clocks.synchronize_all()

    def record(self, stream: StreamQueue) -> EventRecording:
        recording = super().record(stream)
        place = self.clocks.reach("event", self.sites.last if self.capture is None else None)
        recording.clock = self.clocks.recorded(stream.id + 1, place)
        return recording

    def record_in_graph(self) -> EventRecording:
        recording = super().record_in_graph()
        recording.clock = self.clocks.recorded(self.stream.id + 1)
        self.clocks.launch(self.stream.id + 1)  # of the part of the graph behind the event
        return recording

    def wait_event(self, stream: StreamQueue, recording: EventRecording) -> None:
        super().wait_event(stream, recording)
        if self.capture is None:
            self.clocks.wait(stream.id + 1, recording.clock, self.clocks.reach("wait", self.sites.last))

    def order_after_current(self, queue: StreamQueue) -> None:
        super().order_after_current(queue)
        self.clocks.wait(queue.id + 1, self.clocks.recorded(self.stream.id + 1))

    def send(self, queue: StreamQueue, duration: int, *, size: int, name: str) -> EventRecording:
        recording = super().send(queue, duration, size=size, name=name)
        recording.clock = self.clocks.recorded(queue.id + 1)
        return recording

    def wait_peer_event(self, recording: PeerEventRecording) -> None:
        super().wait_peer_event(recording)
        self.clocks.wait(self.stream.id + 1, list(recording.clock))

    def host_clock(self) -> Sequence[int]:
        return self.clocks.recorded(self.clocks.host)

    def join_host_clock(self, clock: Sequence[int]) -> None:
        self.clocks.synchronize(list(clock))

    def reached(self, recording: EventRecording) -> bool:
        reached = super().reached(recording)
        if reached:
            self.clocks.synchronize(recording.clock)
        return reached

    def idle(self, stream: StreamQueue) -> bool:
        idle = super().idle(stream)
        if idle:
            self._synchronized(stream)
        return idle

    def _synchronized(self, stream: StreamQueue, place: int | None = None) -> None:
        self.clocks.synchronize(self.clocks.recorded(stream.id + 1), place)


class WatchedCopies(CopyHandlers):
    """Reports both sides of each copy.

    ``copy`` reports before it copies: the launch must precede the host's wait, which the copy itself may contain.
    """

    def __init__(self, gpu: VirtualGpu, checker: HazardChecker) -> None:
        super().__init__(gpu)
        self._checker = checker

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
        begin, checker = perf_counter_ns(), self._checker
        launch = checker.launch_here(_name(target, source))
        checker.access(launch, source, write=False)
        if type(target) is DeviceTensor:
            checker.announce(target)
        checker.access(launch, target, write=True)
        checker.spent += perf_counter_ns() - begin
        with checker.device_at_work():
            super().copy(target, source, non_blocking=non_blocking)

    def clone(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeviceTensor:
        launch = self._checker.launch_here("clone")
        result = super().clone(args, kwargs)
        self._checker.access(launch, args[0], write=False)
        self._checker.access(launch, result, write=True)
        return result

    def to_copy(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        launch = self._checker.launch_here("_to_copy" if kwargs.get("device") is None else "copy d2h")
        with self._checker.device_at_work():
            result = super().to_copy(args, kwargs)
        begin = perf_counter_ns()
        if not result.is_meta:
            self._checker.access(launch, args[0], write=False)
            self._checker.access(launch, result, write=True)
        self._checker.spent += perf_counter_ns() - begin
        return result


class VirtualMemory:
    """The memory of a virtual GPU, whose tensors hold their values on the host."""

    lasting = True

    pinned: Callable[[torch.Tensor], bool] = staticmethod(is_pinned)
    # C functions, since they are called for each argument of each operation.
    on_device: Callable[[object], TypeGuard[torch.Tensor]] = staticmethod(DeviceTensor.__instancecheck__)  # type: ignore[assignment]
    held: Callable[[torch.Tensor], torch.Tensor] = attrgetter("held")
    block: Callable[[torch.Tensor], Block | None] = attrgetter("block")
    span: Callable[[torch.Tensor], Span | None] = attrgetter("span")

    def keep(self, tensor: torch.Tensor, block: Block, span: Span) -> None:
        assert type(tensor) is DeviceTensor
        tensor.block, tensor.span = block, span


def _name(target: torch.Tensor, source: torch.Tensor) -> str:
    if type(source) is not DeviceTensor:
        return "copy h2d"
    return "copy d2d" if type(target) is DeviceTensor else "copy d2h"
