"""Around each op's handler: what it reads, what it writes, and where in its stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from ....sched.kernels.registry import Kernel, kernels
from ..factories import LIKES
from ..handlers import Handler, Handlers, is_view
from ..reads import READS
from .shadows import IssuedOp

if TYPE_CHECKING:
    from ..gpu import VirtualGpu
    from .checker import Checker

_UNWATCHED = frozenset({"copy_", "clone", "_to_copy", "is_pinned"})  # see WatchedCopies
_MASKS = (torch.bool, torch.uint8)


class WatchedHandlers(Handlers):
    def __init__(self, gpu: VirtualGpu, checker: Checker) -> None:
        super().__init__(gpu)
        self._checker = checker

    def build(self, func: torch._ops.OpOverload) -> Handler:
        handler = self[func] = accounted(self._checker, func, super().build(func))
        return handler


def accounted(checker: Checker, func: torch._ops.OpOverload, handler: Handler) -> Handler:
    """``handler`` computes the op; what comes back tells the checker of it, too."""
    schema = func._schema
    name = schema.name.split("::")[1]
    custom = kernels().get(func)
    if custom is not None:
        return _kernel(checker, custom, handler)
    if name in _UNWATCHED:
        return handler
    if name in LIKES or is_view(schema):
        return _unlaunched(checker, handler)
    if name in READS or name == "_local_scalar_dense":
        return _read(checker, name, handler)
    if name in ("index", "index_put_"):
        return _indexed(checker, name, handler)
    written = [k for k, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    if written:
        return _in_place(checker, name, handler, [(k, schema.arguments[k].name) for k in written])
    return _functional(checker, name, handler)


def _unlaunched(checker: Checker, handler: Handler) -> Handler:
    """A view, or new memory that is filled by ops of its own."""

    def watched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        out = handler(args, kwargs)
        begin = perf_counter_ns()
        for tensor in _tensors(checker, (out,)):
            checker.made(tensor)
        checker.spent += perf_counter_ns() - begin
        return out

    return watched


def _functional(checker: Checker, name: str, handler: Handler) -> Handler:
    def watched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        out = handler(args, kwargs)
        begin = perf_counter_ns()
        launch = checker.launch(name)
        _reads(checker, launch, args)
        _writes(checker, launch, out)
        checker.spent += perf_counter_ns() - begin
        return out

    return watched


def _read(checker: Checker, name: str, handler: Handler) -> Handler:
    """The host waits inside the op, for all of it."""

    def watched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        launch = checker.launch_here(name)
        out = handler(args, kwargs)
        begin = perf_counter_ns()
        _reads(checker, launch, args)
        _writes(checker, launch, out)
        checker.spent += perf_counter_ns() - begin
        return out

    return watched


def _in_place(checker: Checker, name: str, handler: Handler, written: Sequence[tuple[int, str]]) -> Handler:
    places = {k for k, _ in written}

    def watched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        targets = [kwargs[key] if key in kwargs else args[k] for k, key in written]
        _announce(checker, targets)
        out = handler(args, kwargs)
        begin = perf_counter_ns()
        launch = checker.launch(name)
        # Whatever conflicts with reading a target conflicts with writing it.
        _reads(checker, launch, [arg for k, arg in enumerate(args) if k not in places])
        _writes(checker, launch, targets)
        checker.spent += perf_counter_ns() - begin
        return out

    return watched


def _indexed(checker: Checker, name: str, handler: Handler) -> Handler:
    """What an index on the device leads to; with masks and host indices, the whole tensor."""
    puts = name == "index_put_"

    def watched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if puts:
            _announce(checker, args[:1])
        out = handler(args, kwargs)
        begin = perf_counter_ns()
        launch, (tensor, indices, *values) = checker.launch(name), args
        if all(checker.memory.mine(i) and i.dtype not in _MASKS for i in indices):
            checker.indexed(launch, tensor, indices, write=puts)
        else:
            _touch(checker, launch, tensor, write=puts)
        _reads(checker, launch, (indices, *values))
        if not puts:
            _writes(checker, launch, out)
        checker.spent += perf_counter_ns() - begin
        return out

    return watched


def _kernel(checker: Checker, kernel: Kernel, handler: Handler) -> Handler:
    """By its own footprint. The emulator's bookkeeping has none."""
    written = [k for k, a in enumerate(kernel.op._schema.arguments) if a.alias_info and a.alias_info.is_write]

    def watched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        begin = perf_counter_ns()
        _announce(checker, [args[k] for k in written])
        checker.spent += perf_counter_ns() - begin
        before, checker.device_works = (
            checker.device_works,
            True,
        )  # as ``device_at_work``, on the hottest path
        try:
            out = handler(args, kwargs)
        finally:
            checker.device_works = before
        begin = perf_counter_ns()
        launch = checker.launch(kernel.name)
        if kernel.cost is not None:
            checker.kernel(launch, kernel, args, kwargs)
        _writes(checker, launch, out)
        checker.spent += perf_counter_ns() - begin
        return out

    return watched


def _announce(checker: Checker, targets: Sequence[Any]) -> None:
    for tensor in _tensors(checker, targets):
        checker.announce(tensor)


def _reads(checker: Checker, launch: IssuedOp, args: Sequence[Any]) -> None:
    mine = checker.memory.mine
    for arg in args:
        kind = type(arg)
        if kind is list or kind is tuple:
            _reads(checker, launch, arg)
        elif mine(arg):
            checker.read(launch, arg)


def _writes(checker: Checker, launch: IssuedOp, out: Any) -> None:
    for tensor in _tensors(checker, (out,)):
        checker.write(launch, tensor)


def _touch(checker: Checker, launch: IssuedOp, tensor: torch.Tensor, *, write: bool) -> None:
    (checker.write if write else checker.read)(launch, tensor)


def _tensors(checker: Checker, values: Sequence[Any]) -> Iterator[torch.Tensor]:
    mine = checker.memory.mine
    for value in values:
        kind = type(value)
        if kind is list or kind is tuple:
            yield from _tensors(checker, value)
        elif mine(value):
            yield value
