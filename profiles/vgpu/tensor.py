"""The device tensor: a wrapper of a host tensor that holds the values.

Every op that torch runs on it is dispatched to ``__torch_dispatch__``. Its shape, strides and views are those of the
held tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.nn import Parameter

from .device import CURRENT, device

HOST_TENSORS = frozenset({torch.Tensor, Parameter})
# Types of arguments that are passed as they are.
PLAIN = frozenset({int, float, bool, type(None), torch.dtype})

_DATA: Any = torch.Tensor.data
_make = torch.Tensor._make_wrapper_subclass
_NO_KWARGS: Mapping[str, Any] = {}


class DeviceStorage:
    """What a program may ask about the memory of a device tensor."""

    def __init__(self, held: torch.Tensor) -> None:
        self._storage = held.untyped_storage()

    def nbytes(self) -> int:
        return self._storage.nbytes()

    size = __len__ = nbytes

    def data_ptr(self) -> int:
        return CURRENT.get().addresses.give(self._storage)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the storage of a vgpu tensor has no {name} on the virtual GPU")


class DeviceTensor(torch.Tensor):
    """A tensor on the virtual GPU. ``held`` has its values, or is a meta tensor where values are not computed."""

    __slots__ = ("block", "held", "span")
    held: torch.Tensor
    block: Any  # a watcher's record of the memory, which ends with the last tensor that has it
    span: Any  # the part of the block that the tensor covers

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
        return (handlers.get(id(func)) or handlers.build(func))(args, kwargs or _NO_KWARGS)

    def __setitem__(self, index: Any, value: Any) -> None:
        """A number becomes a host tensor, as on CUDA; with plain indices it is a fill or a copy."""
        if not isinstance(value, (int, float)):
            super().__setitem__(index, value)
        elif not _is_plain(index):
            super().__setitem__(index, torch.tensor(value, dtype=self.dtype))
        else:
            view = self[index]
            if view.dim():
                view.fill_(value)
            else:
                view.copy_(torch.tensor(value, dtype=self.dtype))

    @property
    def data(self) -> torch.Tensor:
        """The same values without gradients. What is assigned replaces values and geometry."""
        found: torch.Tensor = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, value)  # raises for a host tensor
        assert isinstance(value, DeviceTensor)
        if self.held.untyped_storage()._cdata != value.held.untyped_storage()._cdata:
            self.block = None
        self.held = value.held
        self.span = None  # of the geometry before

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
        """Once freed, the memory is not issued again before that stream has done its present work."""
        CURRENT.get().watcher.record_stream(self, stream.stream_id)

    def data_ptr(self) -> int:
        """The address of the values, which is unique among the tensors that exist."""
        addresses = CURRENT.get().addresses
        addresses.give(self.held.untyped_storage())
        return addresses.of(self.held)

    def untyped_storage(self) -> Any:
        """The memory of the tensor and of all its views, of which the size and the address are known."""
        return DeviceStorage(self.held)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError("a vgpu tensor cannot be pickled; copy it to the host first")

    def __format__(self, spec: str) -> str:
        return format(str(self) if self.dim() else self.item(), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Torch's own, which reads many of the values one by one."""
        if CURRENT.get(None) is None or self.held.is_meta:
            return f"DeviceTensor({self.held!r}, device='{self.device}')"
        text: str = torch._tensor_str._str(self, tensor_contents=tensor_contents)
        text = text.replace("DeviceTensor(", "tensor(", 1).replace("\n      ", "\n")
        return text.replace(f"device='{device()}'", f"device='{self.device}'")


def wrap(held: torch.Tensor) -> DeviceTensor:
    """The device tensor of these values."""
    stride: tuple[int, ...] | None = held.stride()
    offset: Any = held.storage_offset()
    if stride == (1,) and not offset:
        stride = offset = None  # which torch reads in a fifth of the time of all else
    tensor: DeviceTensor = _make(
        DeviceTensor, held.shape, stride, offset, None, held.dtype, torch.strided, device()
    )
    tensor.held, tensor.block, tensor.span = held, None, None
    return tensor


def follow(tensor: DeviceTensor) -> None:
    """Give the tensor the geometry of its values, which an op may have changed in place."""
    held = tensor.held
    if tensor.size() != held.size() or tensor.stride() != held.stride():
        tensor.data = wrap(held)


def unwrap_named(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """``unwrap`` of arguments that are passed by name."""
    return dict(zip(kwargs, unwrap(tuple(kwargs.values())), strict=True))


def unwrap(args: Sequence[Any]) -> list[Any]:
    """The arguments with held tensors for device tensors. Raises as CUDA does if there is a host tensor among them."""
    return [
        arg.held if (kind := type(arg)) is DeviceTensor else arg if kind in PLAIN else _passed(arg)
        for arg in args
    ]


def _passed(arg: Any) -> Any:
    """What a kernel receives for an argument that is no device tensor."""
    kind = type(arg)
    if kind is list or kind is tuple:
        return unwrap(arg)
    if kind not in HOST_TENSORS:
        return arg
    if arg.dim():
        refuse_mixed(arg.device)
    return arg.clone()  # a host tensor without dimensions is passed by value at the launch


def refuse_mixed(other: torch.device) -> NoReturn:
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{device()} and {other}!"
    )


def _is_plain(index: Any) -> bool:
    """Whether an index consists of numbers, slices, None and ellipses only."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Declare the tensor's host memory pinned, together with all views of it; returns the tensor.

    The property is an attribute of the storage's Python object, which exists exactly as long as the storage, so that an
    address that is used again is not pinned by accident.
    """
    tensor.untyped_storage()._vgpu_pinned = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "_vgpu_pinned", False)


def is_pinned_storage(storage: torch.UntypedStorage) -> bool:
    return getattr(storage, "_vgpu_pinned", False)
