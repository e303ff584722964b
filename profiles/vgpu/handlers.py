"""One handler per op, built on first sight from the op's schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...sched.kernels.registry import kernels
from .bindings import binding
from .cost import GEMMS, bytes_of, gemm
from .custom import custom_handler
from .factories import LIKES, like_handler
from .reads import READS, read_handler, scalar_handler
from .tensor import DeviceTensor, refuse_mixed, unwrap, wrap

if TYPE_CHECKING:
    from .gpu import VirtualGpu

Handler = Callable[[Sequence[Any], Mapping[str, Any]], Any]
_VIEWS_BY_NAME = frozenset({"_unsafe_view", "lift_fresh", "detach", "alias"})


class Handlers(dict[Any, Handler]):
    """Handlers by overload."""

    def __init__(self, gpu: VirtualGpu) -> None:
        super().__init__()
        self._gpu = gpu
        copies, indexing = gpu.copies, gpu.indexing
        self._named: Mapping[str, Handler] = {
            "copy_": copies.copy_,
            "clone": copies.clone,
            "_to_copy": copies.to_copy,
            "index": indexing.index,
            "index_put_": indexing.index_put_,
            "_local_scalar_dense": scalar_handler(gpu),
            "is_pinned": lambda *_: False,
        }

    def build(self, func: torch._ops.OpOverload) -> Handler:
        handler = self[func] = self._choose(func)
        return handler

    def _choose(self, func: torch._ops.OpOverload) -> Handler:
        gpu, schema = self._gpu, func._schema
        name = schema.name.split("::")[1]
        custom = kernels().get(func)
        if custom is not None:
            return custom_handler(gpu, custom)
        if name in self._named:
            return self._named[name]
        if name in LIKES:
            return like_handler(gpu, func, name)
        if name in READS:
            return read_handler(gpu, func, name)
        if is_view(schema):
            return _view(gpu, func)
        if schema.is_mutable:
            return _in_place(gpu, func, name)
        return _functional(gpu, func, name)


def is_view(schema: torch.FunctionSchema) -> bool:
    """Whether the op returns another look at its first argument's memory."""
    name = schema.name.split("::")[1]
    return name in _VIEWS_BY_NAME or any(r.alias_info and not r.alias_info.is_write for r in schema.returns)


def _view(gpu: VirtualGpu, func: torch._ops.OpOverload) -> Handler:
    """Another look at the same memory: no launch."""
    op, runtime = binding(func), gpu.runtime

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        runtime.now += runtime.torch_call
        out = op(args[0].held, *args[1:], **kwargs)
        return wrap(out) if type(out) is torch.Tensor else [wrap(o) for o in out]

    return handler


def _functional(gpu: VirtualGpu, func: torch._ops.OpOverload, name: str) -> Handler:
    """One kernel with new results; none where torch has nothing to compute."""
    op, runtime, duration = binding(func), gpu.runtime, _duration(gpu, name)

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        held = unwrap(args)
        out = gpu.executor.compute(op, held, kwargs)
        single = isinstance(out, torch.Tensor)
        if single and not out.numel():
            runtime.now += runtime.torch_call
        else:
            runtime.kernel(name, duration(held, out))
        return wrap(out) if single else [wrap(o) for o in out]

    return handler


def _in_place(gpu: VirtualGpu, func: torch._ops.OpOverload, name: str) -> Handler:
    """One kernel that writes some of its arguments and returns them. A contiguous zero_ is a memset."""
    op, runtime, duration = binding(func), gpu.runtime, _duration(gpu, name)
    schema = func._schema
    written = [(k, a.name) for k, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    returns = len(schema.returns)

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        targets = [kwargs[key] if key in kwargs else args[k] for k, key in written]
        target = targets[0]
        if type(target) is not DeviceTensor:
            refuse_mixed(target.device)
        held = unwrap(args)
        named = dict(zip(kwargs, unwrap(tuple(kwargs.values())), strict=True)) if kwargs else kwargs
        gpu.executor.mutate(op, held, named)
        result = target.held
        if name == "zero_" and result.is_contiguous():
            runtime.move("memset", runtime.costs.memory(result.nbytes), size=result.nbytes)
        else:
            runtime.kernel(name, duration(held, result))
        if returns == 1:
            return target
        return targets if returns else None

    return handler


def _duration(gpu: VirtualGpu, name: str) -> Callable[[Sequence[Any], Any], int]:
    costs, size_of = gpu.runtime.costs, bytes_of(name)
    if name in GEMMS:
        return lambda held, out: costs.work(gemm(held, out), out.dtype)
    return lambda held, out: costs.memory(size_of(held, out))
