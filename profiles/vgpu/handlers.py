"""One handler per op overload, built from the op's schema on its first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ...sched.kernels.declare import kernels
from .copies import CopyHandlers
from .cost import BYTES, GEMMS, gemm, touched
from .custom import custom_handler
from .device import VirtualGpu
from .executor import mapped, tensors_in
from .factories import like_handler
from .indexing import IndexHandlers
from .tensor import DeviceTensor, follow, refuse_mixed, unwrap, unwrap_named, wrap
from .torch_ops import (
    LIKES,
    READS,
    RESHAPES,
    Handler,
    binding,
    composition,
    is_view,
    reads_of,
    written_arguments,
)

Decorator = Callable[[torch._ops.OpOverload, Handler], Handler]


class OpHandlers(dict[int, Handler]):
    """Handlers by the id of the overload, which lasts as long as torch, since an overload is hashed in Python.
    ``decorate`` wraps each handler when it is built. ``direct`` has those of custom kernels."""

    def __init__(self, gpu: VirtualGpu, copies: CopyHandlers, decorate: Decorator | None = None) -> None:
        super().__init__()
        self.copies = copies
        self.direct: dict[int, Handler] = {}
        self._gpu = gpu
        self._decorate = decorate
        indexing = IndexHandlers(gpu)
        self._by_name: Mapping[str, Handler] = {
            "copy_": copies.copy_,
            "clone": copies.clone,
            "_to_copy": copies.to_copy,
            "index": indexing.index,
            "index_put_": indexing.index_put_,
            "_local_scalar_dense": _scalar(gpu),
            "is_pinned": lambda *_: False,
            "detach_": lambda args, _: args[0],
        }

    def build(self, func: torch._ops.OpOverload) -> Handler:
        self[id(func)] = handler = self._built(func)
        if func in kernels():
            self.direct[id(func)] = handler
        return handler

    def _built(self, func: torch._ops.OpOverload) -> Handler:
        key = composition(func)
        if key is not None:
            # Each of the ops by which torch defines this one is dispatched.
            return lambda args, kwargs: func._op_dk(key, *args, **kwargs)
        chosen = self._choose(func)
        handler = chosen if self._decorate is None else self._decorate(func, chosen)
        return _list_copy(self.copies, handler) if func is torch.ops.aten._foreach_copy_.default else handler

    def _choose(self, func: torch._ops.OpOverload) -> Handler:
        gpu, schema = self._gpu, func._schema
        name = schema.name.split("::")[1]
        custom = kernels().get(func)
        if custom is not None:
            return custom_handler(gpu, custom)
        if name in self._by_name:
            return self._by_name[name]
        if schema.name.startswith("c10d::") and len(schema.returns) == 2:
            return _collective(_functional(gpu, func, name))
        if "sparse" in name:
            raise RuntimeError(f"{name}: the virtual GPU has no sparse tensors")
        if name in LIKES:
            return like_handler(gpu, name)
        if name in ("cat", "stack") and not schema.is_mutable:
            return _concatenation(self.copies, name)
        if name in READS:
            return _read(gpu, func, name)
        if is_view(schema):
            return _view(gpu, func)
        if name in RESHAPES:
            return _reshape(gpu, func)
        if any(a.alias_info and a.alias_info.is_write and "List" in str(a.type) for a in schema.arguments):
            return _lists_in_place(gpu, func, name)
        if schema.is_mutable:
            return _in_place(gpu, func, name)
        return _functional(gpu, func, name)


def _view(gpu: VirtualGpu, func: torch._ops.OpOverload) -> Handler:
    """A view of the same memory, without a launch."""
    op, runtime = binding(func), gpu.runtime

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        runtime.now += runtime.torch_call
        out = op(args[0].held, *args[1:], **kwargs)
        if type(out) is torch.Tensor and not torch.is_inference_mode_enabled():
            return wrap(out)
        return _wrapped_view(args[0], out)

    return handler


def _wrapped_view(base: torch.Tensor, out: Any) -> Any:
    """In ``torch.inference_mode``, too, a view of an ordinary tensor is an ordinary tensor."""
    if torch.is_inference_mode_enabled() and not base.is_inference():
        with torch._C._InferenceMode(False):
            return mapped(out, wrap)
    return mapped(out, wrap)


def _collective(one_kernel: Handler) -> Handler:
    """A collective of torch.distributed, which ends within the call: what others get from its work are the device's
    tensors, not those that hold the values."""
    c10d: Any = torch._C._distributed_c10d

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        torch.distributed.Work.unbox(one_kernel(args, kwargs)[1]).wait()
        ended: Any = torch.futures.Future()
        ended.set_result(args[0])
        return args[0], c10d._create_work_from_future(ended).boxed()

    return handler


_ALIAS: Final = torch.ops.aten.alias.default._op


def _reshape(gpu: VirtualGpu, func: torch._ops.OpOverload) -> Handler:
    """Another geometry, at once and without a launch. A storage that grows is copied to new memory."""
    op, runtime = func._op, gpu.runtime

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        target, block, runtime.now = args[0], args[0].block, runtime.now + runtime.torch_call
        made = _ALIAS(target.held)  # pending work keeps the geometry that it was launched with
        before = made.untyped_storage().nbytes()
        try:
            op(made, *unwrap(args[1:]), **unwrap_named(kwargs))
        except RuntimeError:
            if made.untyped_storage().resizable():
                raise
            made = _copied(
                target.held
            )  # an array is kept of the memory, which torch therefore does not resize
            op(made, *unwrap(args[1:]), **unwrap_named(kwargs))
        target.data = _wrapped_view(target, made)
        if 0 < before < made.untyped_storage().nbytes() and func._schema.name != "aten::set_":
            runtime.copy_within(before)
            gpu.watcher.moved(target, block, before)
        return target

    return handler


def _copied(held: torch.Tensor) -> torch.Tensor:
    """The tensor in a copy of its whole storage."""
    storage = held.untyped_storage().clone()
    return torch.empty(0, dtype=held.dtype).set_(storage, held.storage_offset(), held.shape, held.stride())


def _functional(gpu: VirtualGpu, func: torch._ops.OpOverload, name: str) -> Handler:
    """One kernel with new results; none where they are empty."""
    op, runtime, duration = binding(func), gpu.runtime, _duration(gpu, name)

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        held = unwrap(args)
        out = gpu.executor.compute(op, held, unwrap_named(kwargs) if kwargs else kwargs)
        single = isinstance(out, torch.Tensor)
        results = (out,) if single else tuple(tensors_in(out))
        if results and not any(map(torch.Tensor.numel, results)):
            runtime.now += runtime.torch_call
        else:
            runtime.kernel(name, duration(held, out))
        return wrap(out) if single else mapped(out, wrap)

    return handler


def _in_place(gpu: VirtualGpu, func: torch._ops.OpOverload, name: str) -> Handler:
    """One kernel that writes some of its arguments and returns them; none where it writes nothing, since its target or
    the indices of what it writes are empty."""
    op, runtime, duration = binding(func), gpu.runtime, _duration(gpu, name)
    written, returns = written_arguments(func._schema), len(func._schema.returns)
    resizes = "out" in func._overloadname
    index = next((k for k, argument in enumerate(func._schema.arguments) if argument.name == "index"), None)

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        targets = [kwargs[key] if key in kwargs else args[k] for k, key in written]
        target = targets[0]
        if type(target) is not DeviceTensor:
            refuse_mixed(target.device)
        held = unwrap(args)
        gpu.executor.mutate(op, held, unwrap_named(kwargs) if kwargs else kwargs)
        if resizes:
            for written_tensor in targets:
                follow(written_tensor)
        result = target.held
        if not result.numel() or (index is not None and not held[index].numel()):
            runtime.now += runtime.torch_call
        else:
            runtime.kernel(name, duration(held, result))
        if returns == 1:
            return target
        return targets if returns else None

    return handler


def _lists_in_place(gpu: VirtualGpu, func: torch._ops.OpOverload, name: str) -> Handler:
    """One kernel that writes all tensors of a list; none where all are empty."""
    op, runtime, duration = func._op, gpu.runtime, _duration(gpu, name)

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        held = unwrap(args)
        gpu.executor.mutate(op, held, unwrap_named(kwargs))
        if any(map(torch.Tensor.numel, tensors_in(held[0]))):
            runtime.kernel(name, duration(held, ()))
        else:
            runtime.now += runtime.torch_call

    return handler


def _concatenation(copies: CopyHandlers, name: str) -> Handler:
    """A stack is a concatenation along a new dimension."""

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        held, dim = unwrap(args[0]), args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return copies.concatenate(
            name, [part.unsqueeze(dim) for part in held] if name == "stack" else held, dim
        )

    return handler


def _list_copy(copies: CopyHandlers, one_kernel: Handler) -> Handler:
    """``one_kernel`` where CUDA has one for all pairs; otherwise a copy for each pair."""

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        targets, sources, *rest = args
        if _alike(targets, sources):
            one_kernel(args, kwargs)
            return
        non_blocking = bool(rest[0]) if rest else kwargs.get("non_blocking", False)
        for target, source in zip(targets, sources, strict=True):
            copies.copy(target, source, non_blocking=non_blocking)

    return handler


def _alike(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> bool:
    """Whether all are on the device, each list has one type, and each pair one layout (ATen's
    ForeachBinaryOpList.cu)."""
    return (
        all(type(tensor) is DeviceTensor for tensor in (*targets, *sources))
        and len({target.dtype for target in targets}) == len({source.dtype for source in sources}) == 1
        and all(
            (target.shape, target.stride()) == (source.shape, source.stride())
            for target, source in zip(targets, sources, strict=True)
        )
    )


def _duration(gpu: VirtualGpu, name: str) -> Callable[[Sequence[Any], Any], int]:
    costs, size_of = gpu.runtime.costs, BYTES.get(name, touched)
    if name in GEMMS:
        return lambda held, out: costs.work(gemm(held, out), out.dtype)
    return lambda held, out: costs.memory(size_of(held, out))


def _scalar(gpu: VirtualGpu) -> Handler:
    """``item()``, ``int()``, ``bool()`` and all other reads of one number, which is copied as in ``_read``."""
    op, runtime = torch.ops.aten._local_scalar_dense.default._op, gpu.runtime

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        held = args[0].held
        runtime.copy("d2h", held.itemsize, pinned=True, blocking=True)
        return gpu.executor.read(op, (held,), kwargs)

    return handler


def _read(gpu: VirtualGpu, func: torch._ops.OpOverload, name: str) -> Handler:
    """A kernel whose result, or the result's shape, the host needs: each number is copied to a pinned temporary, and
    the host waits for the copy."""
    op, runtime = func._op, gpu.runtime

    def handler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        held = unwrap(args)
        runtime.kernel(name, runtime.costs.memory(sum(a.nbytes for a in held if isinstance(a, torch.Tensor))))
        for size in reads_of(name, args, kwargs):
            runtime.copy("d2h", size, pinned=True, blocking=True)
        return mapped(gpu.executor.read(op, held, unwrap_named(kwargs)), wrap)

    return handler
