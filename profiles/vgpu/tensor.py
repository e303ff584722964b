"""The device tensor: a wrapper over a tensor of the host that holds the values.

Everything torch does with it arrives at one door, ``__torch_dispatch__``. Shapes, strides and views are right
because they are the held tensor's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.nn import Parameter

if TYPE_CHECKING:
    from .adversary.reuse import Issued
    from .gpu import VirtualGpu
    from .hazards.blocks import Block
    from .hazards.footprints import ByteSpan


class _Closed:
    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("no virtual GPU is open")


CURRENT: ContextVar[VirtualGpu] = ContextVar("vgpu", default=cast("VirtualGpu", _Closed()))  # noqa: B039 - has no state
HOST_TENSORS = frozenset({torch.Tensor, Parameter})

_make = torch.Tensor._make_wrapper_subclass
_NO_KWARGS: Mapping[str, Any] = {}


@cache
def device() -> torch.device:
    """The device, once its name is registered."""
    return torch.device("vgpu", 0)


class DeviceTensor(torch.Tensor):
    """A tensor on the virtual GPU. ``held`` has its values, or lies on meta where values are not kept."""

    __slots__ = ("block", "held", "issued", "span")
    held: torch.Tensor
    block: Block  # its memory and which part of that, where somebody keeps account
    span: ByteSpan
    issued: Issued  # its memory, where freed memory is given away again

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        handlers = CURRENT.get().handlers
        handler: Callable[[Sequence[Any], Mapping[str, Any]], Any] | None = handlers.get(func)
        return (handler or handlers.build(func))(args, kwargs or _NO_KWARGS)

    def __setitem__(self, index: Any, value: Any) -> None:
        CURRENT.get().set_item(self, index, value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def record_stream(self, stream: Any) -> None:
        """Once freed, the memory is not re-issued before that stream has done what it was given by then."""
        CURRENT.get().watcher.record_stream(self, stream.stream_id)

    def data_ptr(self) -> NoReturn:
        raise RuntimeError("a vgpu tensor has no address: data_ptr() is not available on the virtual GPU")

    def untyped_storage(self) -> NoReturn:
        raise RuntimeError(
            "a vgpu tensor has no storage: untyped_storage() is not available on the virtual GPU"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError("a vgpu tensor cannot be pickled; copy it to the host first")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Printing reads the values, as anywhere: a copy that the host waits for."""
        values = self.held if CURRENT.get(None) is None else self.cpu()
        return f"DeviceTensor({values!r}, device='{self.device}')"


def wrap(held: torch.Tensor) -> DeviceTensor:
    """The device tensor of these values."""
    tensor: DeviceTensor = _make(
        DeviceTensor,
        held.size(),
        held.stride(),
        held.storage_offset(),
        None,
        held.dtype,
        held.layout,
        device(),
    )
    tensor.held = held
    return tensor


def unwrap(args: Sequence[Any]) -> list[Any]:
    """The held tensors among the arguments. Raises as CUDA does when a host tensor is mixed in."""
    held = []
    for arg in args:
        kind = type(arg)
        if kind is DeviceTensor:
            held.append(arg.held)
        elif kind is list or kind is tuple:
            held.append(unwrap(arg))
        else:
            if kind in HOST_TENSORS and arg.dim():
                refuse_mixed(arg.device)
            # A number of the host is taken along at the launch.
            held.append(arg.clone() if kind in HOST_TENSORS else arg)
    return held


def refuse_mixed(other: torch.device) -> NoReturn:
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{device()} and {other}!"
    )
