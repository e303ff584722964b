"""Calls on device tensors that reach the handler of their op without torch's dispatcher, which takes longer than it.

Left out is only the way there: each call listed here is dispatched as exactly one op with the same arguments. All
others, and all calls under a mode of torch's, go through the dispatcher. So does ``__getitem__``: a class that defines
it in Python is a sequence to torch, and ``torch.tensor`` of device tensors is something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._ops import OpOverload

from .device import CURRENT
from .tensor import DeviceTensor

_ATEN: Final = torch.ops.aten
_CAT: Final = _ATEN.cat.default
_CLONE: Final = _ATEN.clone.default
_COPY: Final = _ATEN.copy_.default
_INDEX_PUT: Final = _ATEN.index_put_.default
_SELECT: Final = _ATEN.select.int
_SLICE: Final = _ATEN.slice.Tensor
_TO_COPY: Final = _ATEN._to_copy.default
_DEVICE_ALONE: Final = {DeviceTensor}
_LISTS: Final = frozenset({list, tuple})
_ADDED: Final = frozenset({DeviceTensor, int, float})
_HOSTS: Final = ("cpu", torch.device("cpu"))
_PLACES: Final = frozenset({str, torch.device})
_INDICES: Final = frozenset({torch.int64, torch.int32})
_BOUNDS: Final = frozenset({int, type(None)})
_NO_KWARGS: Final[Mapping[str, Any]] = {}
_DISPATCHED_CALL: Final = OpOverload.__call__
_DISPATCHED_CAT: Final = torch.cat

OpCall = tuple[OpOverload, Sequence[Any], Mapping[str, Any]]
"""An op with its arguments, by position and by name."""


def shortcuts() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, function) of each call with a shortcut."""
    yield OpOverload, "__call__", _call
    yield torch, "cat", _cat
    for name, found in _FOUND.items():
        yield DeviceTensor, name, _method(name, found)


def dispatched() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, function) of the same calls as torch makes them."""
    yield OpOverload, "__call__", _DISPATCHED_CALL
    yield torch, "cat", _DISPATCHED_CAT
    for name in _FOUND:
        yield DeviceTensor, name, _OWN.get(name, getattr(torch.Tensor, name))


def _call(op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    """Calls the handler of a custom kernel. The dispatcher is needed for arguments by name, and where no argument is on
    the virtual GPU."""
    gpu = CURRENT.get(None)
    handler = None if gpu is None or kwargs else gpu.handlers.direct.get(id(op))
    modes = _len_torch_function_stack() or _len_torch_dispatch_stack()
    if handler is None or modes or DeviceTensor not in map(type, args):
        return op._op(*args, **kwargs)
    out = handler(args, kwargs)
    return tuple(out) if type(out) is list else out


def _method(name: str, found: Callable[..., OpCall | DeviceTensor | None]) -> Callable[..., Any]:
    """A tensor's method that makes the call that is found for its arguments, or returns the tensor if that is found, or
    else is dispatched."""
    own = _OWN.get(name)

    def method(tensor: DeviceTensor, *args: Any, **kwargs: Any) -> Any:
        modes = _len_torch_function_stack() or _len_torch_dispatch_stack()
        call = None if modes else found(tensor, *args, **kwargs)
        if call is None:
            return (own or getattr(torch.Tensor, name))(tensor, *args, **kwargs)
        if call is tensor:
            return tensor
        op, given, named = call
        handlers = CURRENT.get().handlers
        return (handlers.get(id(op)) or handlers.build(op))(given, named)

    return method


def _handled(op: OpOverload, given: Sequence[Any]) -> Any:
    handlers = CURRENT.get().handlers
    return (handlers.get(id(op)) or handlers.build(op))(given, _NO_KWARGS)


def _cat(tensors: Any, *args: Any, **options: Any) -> Any:
    """Along the first dimension."""
    modes = _len_torch_function_stack() or _len_torch_dispatch_stack()
    if modes or args or options or type(tensors) not in _LISTS or {*map(type, tensors)} != _DEVICE_ALONE:
        return _DISPATCHED_CAT(tensors, *args, **options)
    return _handled(_CAT, ([*tensors],))


def _setitem(tensor: DeviceTensor, index: Any, value: Any) -> OpCall | None:
    """Tensors of indices, or a slice for a value of its size. Torch removes leading dimensions of one element from the
    value by a view."""
    if type(value) is not DeviceTensor:
        return None
    size = value.held.size()
    if type(index) is slice:
        part = _part(tensor, index, size)
        return None if part is None else (_COPY, (part, value), _NO_KWARGS)
    indices = index if type(index) is tuple else (index,)
    if not all(map(_selects, indices)) or (size and size[0] == 1):
        return None
    return _INDEX_PUT, (tensor, list(indices), value), _NO_KWARGS


def _part(tensor: DeviceTensor, index: slice, size: torch.Size) -> DeviceTensor | None:
    """The view ``tensor[index]``, if it has that size. For a slice of everything torch makes no view."""
    whole = tensor.held.size()
    if index.step is not None or not {type(index.start), type(index.stop)} <= _BOUNDS or not whole:
        return None
    start, stop, _ = index.indices(whole[0])
    if (stop - start, *whole[1:]) != size:
        return None
    return tensor if size == whole else _handled(_SLICE, (tensor, 0, start, stop))


def _selects(index: Any) -> bool:
    """Whether it is a tensor of indices. One without dimensions is read by the host."""
    return type(index) is DeviceTensor and index.held.dtype in _INDICES and index.held.dim() > 0


def _to(tensor: DeviceTensor, *args: Any, **options: Any) -> OpCall | DeviceTensor | None:
    """To another type, or to the host. A tensor that has the type is returned as it is."""
    kind = type(args[0]) if len(args) == 1 else None
    if kind is torch.dtype and not options:
        return tensor if args[0] is tensor.held.dtype else (_TO_COPY, (tensor,), {"dtype": args[0]})
    if kind in _PLACES and args[0] in _HOSTS and options.keys() <= {"non_blocking"}:
        return _TO_COPY, (tensor,), {"device": _HOSTS[1], **options}
    return None


def _narrow(tensor: DeviceTensor, dim: int, start: Any, length: Any) -> OpCall | None:
    """Torch checks the bounds, which a slice does not."""
    fits = type(start) is type(length) is int and 0 <= start <= start + length <= tensor.held.size(dim)
    return (_SLICE, (tensor, dim, start, start + length), _NO_KWARGS) if fits else None


def _select(tensor: DeviceTensor, dim: int, index: Any) -> OpCall | None:
    return (_SELECT, (tensor, dim, index), _NO_KWARGS) if type(index) is int else None


def _clone(tensor: DeviceTensor, **options: Any) -> OpCall | None:
    return None if options else (_CLONE, (tensor,), _NO_KWARGS)


def _copy(tensor: DeviceTensor, source: Any, non_blocking: bool = False) -> OpCall | None:
    return (_COPY, (tensor, source, non_blocking), _NO_KWARGS) if type(source) is DeviceTensor else None


def _arithmetic(op: OpOverload) -> Callable[..., OpCall | None]:
    return lambda tensor, other: (op, (tensor, other), _NO_KWARGS) if type(other) in _ADDED else None


_FOUND: Final[Mapping[str, Callable[..., OpCall | DeviceTensor | None]]] = {
    "__setitem__": _setitem,
    "__add__": _arithmetic(_ATEN.add.Tensor),
    "__sub__": _arithmetic(_ATEN.sub.Tensor),
    "__mul__": _arithmetic(_ATEN.mul.Tensor),
    "narrow": _narrow,
    "select": _select,
    "to": _to,
    "clone": _clone,
    "copy_": _copy,
}
_OWN: Final = {name: vars(DeviceTensor)[name] for name in _FOUND if name in vars(DeviceTensor)}
