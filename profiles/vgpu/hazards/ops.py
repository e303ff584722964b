"""Wraps each op's handler so that the checker receives what the op reads and writes, in its stream's order, and torch's
tensor methods so that it receives the host's own accesses to pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from time import perf_counter_ns
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ....sched.kernels.declare import Kernel, kernels
from ...platform.machine import Watcher
from ..patching import attributes_set
from ..torch_ops import LIKES, MASKS, READS, RESHAPES, Handler, composition, is_view, written_arguments
from .arrays import PinnedArray
from .blocks import DeviceMemory, device_tensors
from .checker import HazardChecker

_HOST = torch.device("cpu")
_ALONG = frozenset({"index_select", "index_copy_", "index_add_", "index_fill_"})
# Reads by the host whose results a kernel computes that the host launches after the wait.
_READ_FIRST = {"nonzero", "masked_select", "repeat_interleave", "bincount", "histc", "multinomial"}
_COPIES = frozenset({"copy_", "clone", "_to_copy", "is_pinned"})  # their handlers call the checker themselves


def checked(checker: HazardChecker, func: torch._ops.OpOverload, handler: Handler) -> Handler:
    """The handler, with calls of the checker around it."""
    schema = func._schema
    name = schema.name.split("::")[1]
    custom = kernels().get(func)
    if custom is not None:
        return _kernel(checker, custom, handler)
    if name in _COPIES:
        return handler
    if name in LIKES or name in RESHAPES or is_view(schema):
        return _unlaunched(checker, handler)
    return _launched(checker, schema, handler)


def _unlaunched(checker: HazardChecker, handler: Handler) -> Handler:
    """A view, or new memory that is filled by ops of its own."""

    def watched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        out = handler(args, kwargs)
        begin = perf_counter_ns()
        for tensor in device_tensors(checker.memory, (out,)):
            checker.made(tensor)
        checker.spent += perf_counter_ns() - begin
        return out

    return watched


def _launched(checker: HazardChecker, schema: torch.FunctionSchema, handler: Handler) -> Handler:
    """An op that writes some of its arguments, or else its results."""
    name, written = schema.name.split("::")[1], written_arguments(schema)
    positions, names = {k for k, _ in written}, {name for _, name in written}
    # Whether the host waits for the op inside the handler, which the op's launch therefore precedes.
    waits = name == "_local_scalar_dense" or (name in READS and name not in _READ_FIRST)
    selects = name in ("index", "index_put_") or (name in _ALONG and schema.overload_name != "out")

    def watched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        targets = [kwargs[key] if key in kwargs else args[k] for k, key in written]
        if targets:
            checker.announce(targets)
        launch = checker.launch_here(name) if waits else None
        out = handler(args, kwargs)
        begin = perf_counter_ns()
        launch = launch or checker.launch(name)
        # Accesses that conflict with a read of a target conflict with its write, too.
        read = [arg for k, arg in enumerate(args) if k not in positions]
        read += [arg for name, arg in kwargs.items() if name not in names]
        writes = [*(targets or (out,))]
        if selects and (indices := _selected(checker.memory, name, args)) is not None:
            checker.indexed(launch, args[0], indices, write=bool(targets))
            read, writes = (read, []) if targets else (read[1:], writes)
        if name == "native_batch_norm" and args[5]:  # in training it updates the running mean and variance
            writes += args[3:5]
        checker.accesses(launch, read, write=False)
        checker.accesses(launch, writes, write=True)
        checker.spent += perf_counter_ns() - begin
        return out

    return watched


def _selected(memory: DeviceMemory, name: str, args: Sequence[Any]) -> Sequence[Any] | None:
    """The indices on the device, of the first dimensions or along one of them, that select what is accessed of
    ``args[0]``; None for masks and host indices, with which the whole tensor counts."""
    indices = [None] * (args[1] % max(args[0].dim(), 1)) + [args[2]] if name in _ALONG else args[1]
    selects = all(i is None or (memory.on_device(i) and i.dtype not in MASKS) for i in indices)
    return indices if selects else None


def _kernel(checker: HazardChecker, kernel: Kernel, handler: Handler) -> Handler:
    """A custom kernel's accesses are those that it declares. The emulator's own bookkeeping, without cost, has none."""
    written = [k for k, _ in written_arguments(kernel.op._schema)]
    returns = bool(kernel.op._schema.returns)

    def watched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        begin = perf_counter_ns()
        # ``device_at_work`` without a context manager, since this is the hottest path.
        before, checker.device_works = checker.device_works, True
        try:
            for k in written:
                checker.announce(args[k])
            checker.spent += perf_counter_ns() - begin
            out = handler(args, kwargs)
        finally:
            checker.device_works = before
        begin = perf_counter_ns()
        launch = checker.launch(kernel.name)
        if kernel.cost is not None:
            checker.kernel(launch, kernel, args)
        if returns:
            checker.accesses(launch, (out,), write=True)
        checker.spent += perf_counter_ns() - begin
        return out

    return watched


# fmt: off
_UNDISPATCHED_READS = ("tolist", "__iter__", "__array__", "__reduce_ex__", "__deepcopy__")
_DISPATCHED = (
    "item", "clone", "__int__", "__float__", "__bool__", "__index__",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__floordiv__", "__mod__",
    "__neg__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__",
    "sum", "mean", "min", "max", "amin", "amax", "argmin", "argmax", "any", "all", "cumsum", "equal", "unique",
    "index_select", "gather", "nonzero", "sort", "where", "__setitem__",
)
# fmt: on
# Methods of one operator each, which writes the whole tensor and reads all arguments.
_WRITES = ("copy_", "fill_", "zero_", "add_", "sub_", "mul_")


def host_accesses(
    watcher: Callable[[], Watcher | None], memory: DeviceMemory
) -> AbstractContextManager[None]:
    """For the duration of a block, torch's tensor methods report their accesses to the watcher that is current.

    A NumPy view of pinned memory reports its own. ``pinned[indices]`` is not seen, except in programs, whose every call
    of torch passes ``host_ops``: a class that has once had a ``__getitem__`` written in Python is a sequence from then
    on, to ``torch.tensor`` too.
    """
    methods = [(name, getattr(torch.Tensor, name)) for name in (*_UNDISPATCHED_READS, *_DISPATCHED, *_WRITES)]
    return attributes_set(
        [
            *((torch.Tensor, name, _reporting(name, method, watcher, memory)) for name, method in methods),
            (torch.Tensor, "numpy", _arrays(torch.Tensor.numpy, watcher, memory)),
        ]
    )


def _arrays(
    method: Callable[..., Any], watcher: Callable[[], Watcher | None], memory: DeviceMemory
) -> Callable[..., Any]:
    def report(op: str, tensor: torch.Tensor, write: bool) -> None:
        if (current := watcher()) is not None:
            current.host_access(op, tensor, write=write)

    @wraps(method)
    def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made, current = method(tensor, *args, **kwargs), watcher()
        if current is None or current.device_works or memory.on_device(tensor) or not memory.pinned(tensor):
            return made
        return PinnedArray.of(tensor, made, report)

    return numpy


def _reporting(
    name: str, method: Callable[..., Any], watcher: Callable[[], Watcher | None], memory: DeviceMemory
) -> Callable[..., Any]:
    dispatched, writes = name in _DISPATCHED, name in _WRITES

    @wraps(method)
    def patched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        current = watcher()
        if current is None or current.device_works or memory.on_device(tensor):
            return method(tensor, *args, **kwargs)
        values = (tensor, *args, *kwargs.values())
        # A mode of functions may report the same call, by ``host_ops``.
        if dispatched or (writes and torch._C._len_torch_function_stack()):
            with host_ops(name, current, memory, values):
                return method(tensor, *args, **kwargs)
        # A copy from the device is the device's access.
        if not any(map(memory.on_device, values)):
            for part in _pinned(memory, values):
                current.host_access(_called(name), part, write=writes and part is tensor)
        return method(tensor, *args, **kwargs)

    return patched


def host_ops(
    name: str, watcher: Watcher, memory: DeviceMemory, arguments: Iterable[Any]
) -> AbstractContextManager[object]:
    """Surrounds a call of torch: what its operators on host tensors read and write of pinned memory is reported as the
    call's access. Does nothing inside another such call, and where none of the arguments is in pinned memory."""
    if watcher.device_works or next(_pinned(memory, arguments), None) is None:
        return nullcontext()
    if isinstance(_get_current_dispatch_mode(), _HostOps):
        return nullcontext()
    return _HostOps(_called(name), watcher, memory)


class _HostOps(TorchDispatchMode):
    """Reports what operators on host tensors do with pinned memory. Those that torch composes of others count as these,
    and views and new memory have no access."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its compiler."""
        return False

    def __init__(self, op: str, watcher: Watcher, memory: DeviceMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._op, self._watcher, self._memory = op, watcher, memory

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named, (key, accesses, written) = kwargs or {}, _at_host(func)
        if key is not None:
            with self:
                return func._op_dk(key, *args, **named)
        values = (*args, *named.values())
        # A copy from or to the device is the device's access.
        at_host = named.get("device", _HOST) == _HOST and not device_tensors(self._memory, values)
        if accesses and at_host:
            changed = [args[k] if k < len(args) else named.get(out) for k, out in written]
            targets = {id(tensor) for tensor in _pinned(self._memory, changed)}
            for tensor in _pinned(self._memory, values):
                self._watcher.host_access(self._op, tensor, write=id(tensor) in targets)
        return func(*args, **named)


@cache
def _at_host(func: torch._ops.OpOverload) -> tuple[torch._C.DispatchKey | None, bool, list[tuple[int, str]]]:
    """What composes the op, if other ops do; whether it has accesses; and which arguments it writes."""
    schema, name = func._schema, func._schema.name.split("::")[1]
    without = name in LIKES or name in RESHAPES or name == "is_pinned" or is_view(schema)
    return composition(func), not without, written_arguments(schema)


def _pinned(memory: DeviceMemory, values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The host tensors in pinned memory among values and lists of values."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _pinned(memory, value)
        elif not isinstance(value, torch.Tensor) or memory.on_device(value):
            continue
        elif torch._C._has_storage(value) and memory.pinned(value):
            yield value


def _called(name: str) -> str:
    return name.strip("_") if name.startswith("__") else name
