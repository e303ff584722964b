"""The decorator that declares a kernel, and helpers for its cost, its footprint and its outputs.

The op's schema and, by default, its footprint follow from the signature of the torch implementation::

    @kernel(
        mutates=("residual",),
        meta=lambda x: meta_like(x),
        cost=lambda x, residual, weight: Work(2 * nbytes(x, residual) + nbytes(weight)),
    )
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

``meta``, ``cost`` and ``footprint`` take the op's arguments that they name, or groups of them (see ``signature``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor

from .registry import Access, Kernel, Work, register
from .signature import Signature

NAMESPACE = "schedbench"
INT32, INT64 = 4, 8  # bytes

_META = torch.device("meta")
_empty_strided = torch.empty_strided  # without the parameter that an emulated device adds
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def kernel(
    *,
    cost: Callable[..., Work] | None,
    meta: Callable[..., Tensor | tuple[Tensor, ...] | None] | None = None,
    footprint: Callable[..., tuple[Access, ...]] | None = None,
    mutates: Collection[str] = (),
    integer: bool = False,
    fixed_cost: bool = True,
    triton: str = "",
    strided: Collection[str] = (),
) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Register the decorated torch implementation as an op of its name, a leading underscore left out.

    The name becomes the op itself, so that calling it goes through torch's dispatcher. ``mutates`` are the tensors
    that it writes to. Without ``meta`` it returns nothing. Without ``footprint`` it reads all other tensors as a whole
    and then writes these. ``strided`` are the tensors that its Triton kernel takes with gaps. For the rest see
    ``registry.Kernel``. Raises TypeError where something names an argument that the op does not have.
    """

    def declare(implementation: Callable[..., Any]) -> torch._ops.OpOverload:
        signature = Signature(implementation)
        name = implementation.__name__.lstrip("_")
        if (meta is None) != (signature.returns is type(None)):
            raise TypeError(f"{name} returns something exactly if its meta does")
        _LIBRARY.define(signature.schema(name, mutates))
        read = [tensor for tensor in signature.tensors() if tensor not in mutates]
        declared = Kernel(
            name,
            op=getattr(getattr(torch.ops, NAMESPACE), name).default,
            signature=signature,
            impl=signature.bind(implementation),
            meta=_nothing if meta is None else signature.bind(meta),
            cost=None if cost is None else signature.bind(cost),
            footprint=_whole(signature, read, mutates) if footprint is None else signature.bind(footprint),
            integer=integer,
            fixed_cost=fixed_cost,
            triton=triton,
            dense=frozenset(signature.places(set(read) - set(strided))),
        )
        _LIBRARY.impl(name, declared.impl, "CPU")
        _LIBRARY.impl(name, on_cuda(declared) if triton else declared.impl, "CUDA")
        _LIBRARY.impl(name, declared.meta, "Meta")
        register(declared)
        return declared.op

    return declare


def _nothing(*_: object) -> None:
    return None


def _whole(
    signature: Signature, read: Collection[str], written: Collection[str]
) -> Callable[..., tuple[Access, ...]]:
    if Sequence[Tensor] in signature.types.values():
        raise TypeError("a kernel of lists of tensors has to declare its footprint")
    reading, writing = signature.places(read), signature.places(written)

    def footprint(*args: Any) -> tuple[Access, ...]:
        return (
            *(Access(args[place], write=False) for place in reading if args[place] is not None),
            *(Access(args[place], write=True) for place in writing if args[place] is not None),
        )

    return footprint


def meta_tensor(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """A contiguous tensor of ``shape`` on the meta device, made without running an op there."""
    return _empty_strided(shape, contiguous_strides(shape), dtype=dtype, device=_META)


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return strides


def meta_like(tensor: Tensor) -> Tensor:
    """``meta_tensor`` of the same shape and dtype."""
    return meta_tensor(*tensor.shape, dtype=tensor.dtype)


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of all elements; those that are None count nothing."""
    total = 0
    for tensor in tensors:
        if tensor is not None:
            total += tensor.nbytes
    return total


def total_length(lens: Tensor) -> int:
    """The sum of lengths [b] in the host's memory. A list is added in less time than torch or NumPy need for few."""
    return sum(cast("list[int]", lens.tolist()))


def reads(*tensors: Tensor | None) -> tuple[Access, ...]:
    """Each tensor that is not None, read as a whole."""
    return tuple(Access(t, write=False) for t in tensors if t is not None)


def on_cuda(kernel: Kernel) -> Callable[..., Any]:
    """Returns a function that imports ``triton_kernel``'s module at its first call: Triton takes a second to import,
    and other devices do not need it. Without Triton, and in float64, which serves as a reference, it runs the torch
    implementation."""

    @cache
    def fast() -> Callable[..., Any]:
        return kernel.impl if find_spec("triton") is None else triton_kernel(kernel)

    def run(*args: Any) -> Any:
        return kernel.impl(*args) if _is_double(args[0]) else fast()(*args)

    return run


def triton_kernel(kernel: Kernel) -> Callable[..., Any]:
    """Returns the launch function of the kernel's name in its module of ``triton/``, as a function of all the op's
    arguments. Those at the positions ``dense`` are made contiguous first, which costs nothing where they are already.
    Raises ImportError without Triton."""
    module = import_module(f"{__package__}.triton.{kernel.triton}")
    launch, dense = kernel.signature.bind(getattr(module, kernel.name)), kernel.dense

    def run(*args: Any) -> Any:
        return launch(*(_contiguous(arg) if place in dense else arg for place, arg in enumerate(args)))

    return run


def _contiguous(arg: Any) -> Any:
    return arg.contiguous() if isinstance(arg, torch.Tensor) else arg


def _is_double(first: object) -> bool:
    return isinstance(first, torch.Tensor) and first.dtype == torch.float64
