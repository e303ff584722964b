"""Finds accesses that nothing orders on a CUDA device, from inside the process: feeds the hazard checker from torch's
dispatch, where an operator's schema says what it reads and writes, and from the calls of streams, events and graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...sched.observe import Observer, StepInfo
from ..record.timeline import Sink, Site, Window
from ..vgpu.hazards.checker import HazardChecker
from ..vgpu.hazards.clocks import Clock, VectorClocks
from ..vgpu.hazards.footprints import Span, span
from ..vgpu.hazards.ops import checked, host_accesses
from ..vgpu.hazards.shadow import Block
from ..vgpu.patching import Function, Target, attributes_set, replaced, surrounded
from ..vgpu.sites import Sites
from ..vgpu.torch_ops import LIKES, Handler
from .dispatch_counts import CopyRules


class Current(NamedTuple):
    id: int


class ProgramOrder:
    """The order of operations, from the calls of streams, events and graphs: the vector clocks of a program on a device
    module, and small numbers for its streams. A wait inside a capture orders nothing outside it."""

    def __init__(self, module: Any, watch: Sequence[Path]) -> None:
        self.clocks = VectorClocks()
        self.sites = Sites(watch)
        self.streams: dict[int, str] = {}  # names by number
        self.capturing = False
        self._module = module
        self._numbers: dict[int, int] = {}
        # An event and its clock, by the event's id.
        self._events: dict[int, tuple[weakref.ref[Any], Clock]] = {}

    @property
    def stream(self) -> Current:
        return Current(self.number(self._module.current_stream()))

    def number(self, stream: Any) -> int:
        return self._numbers.setdefault(int(stream.stream_id), len(self._numbers))

    def waited(self) -> None:
        """The host has waited for all operations of the current stream."""
        self._done(self._module.current_stream())

    def waited_for_all(self) -> None:
        self.clocks.synchronize_all()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Follow the calls of streams and events in this block."""
        module = self._module
        event, stream = module.Event, module.Stream
        updates: Mapping[Target, Callable[[Sequence[Any], Any], None]] = {
            Target(event, "record", "cudaEventRecord"): lambda args, _: self._recorded(*args),
            Target(event, "wait", "cudaStreamWaitEvent"): lambda args, _: self._awaited(*args),
            Target(event, "query", "cudaEventQuery"): lambda args, done: (
                self._reached(args[0]) if done else None
            ),
            Target(event, "synchronize", "cudaEventSynchronize"): lambda args, _: self._reached(args[0]),
            Target(stream, "query", "cudaStreamQuery"): lambda args, done: (
                self._done(args[0]) if done else None
            ),
            Target(stream, "synchronize", "cudaStreamSynchronize"): lambda args, _: self._done(args[0]),
            Target(module, "synchronize", "cudaDeviceSynchronize"): lambda *_: self.waited_for_all(),
            # Torch's waits for the device first.
            Target(module.graph, "__enter__", "cudaDeviceSynchronize"): lambda *_: self.waited_for_all(),
        }

        def wrap(target: Target, function: Function) -> Function:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                result = function(*args, **kwargs)
                updates[target]((*args, *kwargs.values()), result)
                return result

            return wrapped

        with replaced(list(updates), wrap):
            yield

    def _recorded(self, event: Any, stream: Any = None) -> None:
        known = self.clocks.recorded(self._actor(stream))
        self._events[id(event)] = weakref.ref(event), known

    def _awaited(self, event: Any, stream: Any = None) -> None:
        if not self.capturing:
            self.clocks.wait(self._actor(stream), self._known(event))

    def _reached(self, event: Any) -> None:
        self.clocks.synchronize(self._known(event))

    def _done(self, stream: Any) -> None:
        self.clocks.synchronize(self.clocks.recorded(self.number(stream) + 1))

    def _known(self, event: Any) -> Clock:
        """A copy of the event's clock; empty for an event that was never recorded."""
        owner, known = self._events.get(id(event), (None, []))
        return [*known] if owner is not None and owner() is event else []

    def _actor(self, stream: Any) -> int:
        return (self.stream.id if stream is None else self.number(stream)) + 1


Arguments = Sequence[Any]
Named = Mapping[str, Any]

# Kernels that fill new memory, by the factory's name without like or new. Other factories' kernels have their names.
_FILLS: Final = {
    "zeros": "zero_",
    "ones": "fill_",
    "full": "fill_",
    "scalar_tensor": "fill_",
    "rand": "uniform_",
    "randn": "normal_",
}
_UNSEEN: Final = frozenset({"record_stream", "is_pinned"})  # handled elsewhere, or without an access


class HazardWatch(TorchDispatchMode, Observer):
    """Reports to the checker each operator of this thread that accesses the device, except for the checker's own. Has
    the names behind the small integers of its records, and the steps, which are all that such a run measures. Source
    lines of ``watch`` are recorded."""

    def __init__(self, device: WatchedDevice, watch: Sequence[Path]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._order = ProgramOrder(device.module, watch)
        self.checker = HazardChecker(self._order, device)
        self._launched: list[StepInfo] = []
        self._settled: list[StepInfo] = []
        self._excluded = False
        self._handlers: dict[Any, Handler] = {}
        self._named: Mapping[str, Callable[[Any, Arguments, Named], Any]] = {
            "copy_": self._copy,
            "_to_copy": self._to_copy,
            "clone": self._to_copy,
            "lift_fresh": self._lift_fresh,
        }

    @property
    def sites(self) -> Sequence[Site]:
        return self._order.sites.resolved()

    @property
    def streams(self) -> dict[int, str]:
        return self._order.streams

    def stream(self, name: str, stream: Any) -> None:
        self._order.streams[self._order.number(stream)] = name

    def launched(self, info: StepInfo) -> None:
        self._launched.append(info)

    def settled(self, info: StepInfo) -> None:
        self._settled.append(info)

    def deliver(self, sink: Sink, end: int) -> None:
        sink.feed(Window(0, end, launched=self._launched, settled=self._settled))
        self._launched, self._settled = [], []

    def peek(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values on the host, hidden from the checker."""
        with self.excluded():
            return tensor.cpu()

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Check all that this thread does on the device in this block. The checker's own reads make the host wait, so
        times mean nothing."""
        checker = self.checker
        with (
            checker.listening(),
            self._order.installed(),
            attributes_set(self._calls()),
            host_accesses(lambda: checker, checker.memory),
            self,
        ):
            yield self

    def _calls(self) -> Iterator[tuple[Any, str, Function]]:
        """The calls that are neither operators nor order streams, in place of torch's."""
        checker, order, device = self.checker, self._order, self._device

        def record_stream(record: Function, tensor: torch.Tensor, stream: Any) -> None:
            checker.record_stream(tensor, order.number(stream))
            record(tensor, stream)

        def capture_begin(begin: Function, graph: Any, *args: Any, **kwargs: Any) -> None:
            begin(graph, *args, **kwargs)
            order.capturing = True
            checker.capturing(graph)

        def capture_end(end: Function, graph: Any) -> None:
            order.capturing = False
            checker.capturing(None)
            end(graph)

        def replay(launch: Function, graph: Any) -> None:
            with self.excluded(), checker.replaying(graph):
                launch(graph)

        graph = device.module.CUDAGraph
        yield device.tensors, "record_stream", surrounded(device.tensors.record_stream, record_stream)
        for call in (capture_begin, capture_end, replay):
            yield graph, call.__name__, surrounded(getattr(graph, call.__name__), call)

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Ignore the operators of this block, which are the tool's."""
        before, self._excluded = self._excluded, True
        try:
            yield
        finally:
            self._excluded = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # fmt: skip
        named = kwargs or {}
        if self._excluded:
            return func(*args, **named)
        self._order.sites.here(2)
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._handler(func)
        if any(map(self._on_device, args)) or any(map(self._on_device, named.values())):
            return handler(args, named)
        return self._without_operands(func, args, named)

    def _handler(self, func: Any) -> Handler:
        name = func._opname
        compute = partial(self._compute, func)
        if name in _UNSEEN:
            return compute
        if name in self._named:
            return partial(self._named[name], func)
        handler = checked(self.checker, func, compute)
        return partial(self._fill, name, handler) if name in LIKES else handler

    def _on_device(self, value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._on_device, value))
        return self.checker.memory.on_device(value)

    def _compute(self, func: Any, args: Arguments, kwargs: Named) -> Any:
        out = func(*args, **kwargs)
        copies = self._device.copies(func._opname, args, kwargs, out)
        if any(what.endswith(" blocking") for what, _ in copies):
            self._order.waited()
        return out

    # ---- new memory ----------------------------------------------------------------------------------------

    def _without_operands(self, func: Any, args: Arguments, kwargs: Named) -> Any:
        """Run an operator without operands on the device: an upload, a factory, or one of the host."""
        if func._opname == "_to_copy":
            return self._handlers[func](args, kwargs)
        return self._fill(func._opname, lambda args, kwargs: func(*args, **kwargs), args, kwargs)

    def _fill(self, name: str, handler: Handler, args: Arguments, kwargs: Named) -> Any:
        out = handler(args, kwargs)
        kind = name.removeprefix("new_").removesuffix("_like")
        if not self.checker.memory.on_device(out):
            return out
        if kind.startswith("empty"):
            self.checker.made(out)
        else:
            self.checker.generated(_FILLS.get(kind, name), out)
        return out

    # ---- copies --------------------------------------------------------------------------------------------

    def _copy(self, func: Any, args: Arguments, kwargs: Named) -> Any:
        checker, (target, source) = self.checker, args[:2]
        up, down = (not checker.memory.on_device(source), not checker.memory.on_device(target))
        launch = checker.launch("copy h2d" if up else "copy d2h" if down else "copy d2d")
        checker.access(launch, source, write=False)
        if not down:
            checker.announce(target)
        checker.access(launch, target, write=True)
        return self._compute_at_work(func, args, kwargs)

    def _to_copy(self, func: Any, args: Arguments, kwargs: Named) -> Any:
        checker, source = self.checker, args[0]
        device = checker.memory.on_device(source)
        place = kwargs.get("device")
        if not device and (place is None or place.type != self._device.type):
            return func(*args, **kwargs)  # from host to host
        name = func._opname if device and place is None else "copy d2h" if device else "copy h2d"
        launch = checker.launch(name)
        checker.access(launch, source, write=False)
        out = self._compute_at_work(func, args, kwargs)
        checker.access(launch, out, write=True)
        return out

    def _lift_fresh(self, func: Any, args: Arguments, kwargs: Named) -> Any:
        """``torch.tensor(..., device=)``, whose values have been uploaded before this operator."""
        self.checker.access(self.checker.launch("copy h2d"), args[0], write=True)
        return self._compute(func, args, kwargs)

    def _compute_at_work(self, func: Any, args: Arguments, kwargs: Named) -> Any:
        with self.checker.device_at_work():
            return self._compute(func, args, kwargs)


_BLOCK = "_schedbench_block"  # attribute of a storage's Python object, which exists as long as the storage


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class WatchedDevice(CopyRules):
    """A device whose memory the checker reads. No references to tensors are kept, since they would keep blocks from
    being freed. ``real`` returns the tensor that has the storage of a tensor."""

    module: Any  # torch.cuda or a module like it
    tensors: Any = torch.Tensor  # the class that has record_stream
    real: Callable[[torch.Tensor], torch.Tensor] = itself
    lasting: bool = False

    def pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.real(tensor)

    def block(self, tensor: torch.Tensor) -> Block | None:
        return getattr(self.real(tensor).untyped_storage(), _BLOCK, None)

    def keep(self, tensor: torch.Tensor, block: Block, span: Span) -> None:  # noqa: ARG002
        setattr(self.real(tensor).untyped_storage(), _BLOCK, block)

    def span(self, tensor: torch.Tensor) -> Span | None:
        return None if self.block(tensor) is None else span(self.real(tensor))
