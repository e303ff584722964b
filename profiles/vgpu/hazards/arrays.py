"""NumPy views of pinned memory, which report what the program reads and writes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import numpy as np
import torch

# Receives an operation, the memory, and whether it is written.
Report = Callable[[str, torch.Tensor, bool], None]

# fmt: off
_READS = (
    "tolist", "item", "copy", "astype", "tobytes", "nonzero", "take", "argmax", "argmin", "argsort", "searchsorted",
    "cumsum", "dot", "repeat", "flatten", "compress", "choose", "round", "__iter__", "__contains__", "__bool__",
    "__int__", "__float__", "__index__", "__reduce__", "__copy__", "__deepcopy__",
)
# fmt: on
_WRITES = ("fill", "sort", "put", "partition")
_WRITING = frozenset({np.copyto, np.put, np.place, np.putmask, np.fill_diagonal})  # the first argument
_VALUELESS = frozenset(
    {
        np.shape,
        np.ndim,
        np.size,
        np.empty_like,
        np.zeros_like,
        np.ones_like,
        np.full_like,
        np.may_share_memory,
    }
)

_reported = ContextVar("reported", default=0)  # how many accesses were


class PinnedArray(np.ndarray):
    """An array over the memory of a pinned tensor, and each view of it. A tensor that is made of one by
    ``torch.from_numpy`` reports nothing."""

    _memory: torch.Tensor | None = None
    _report: Report

    @classmethod
    def of(cls, tensor: torch.Tensor, array: Any, report: Report) -> Any:
        made = array.view(cls)
        made._memory, made._report = tensor, report
        return made

    def __array_finalize__(self, source: Any) -> None:
        if isinstance(source, PinnedArray) and source._memory is not None:
            self._memory, self._report = source._memory, source._report

    def _accessed(self, name: str, *, write: bool) -> None:
        """A result that has memory of its own is none of the tensor's."""
        memory = self._memory
        if memory is None or not self.size:
            return
        low, high = np.lib.array_utils.byte_bounds(self)
        begin, item = low - memory.data_ptr(), memory.itemsize
        if 0 <= begin < memory.nbytes:
            size = -(-(high - low) // item)
            _reported.set(_reported.get() + 1)
            self._report(
                name, memory.as_strided((size,), (1,), memory.storage_offset() + begin // item), write
            )

    def _part(self, index: Any) -> PinnedArray:
        """The memory of ``self[index]``: a view, also of one item; all of ``self`` where items are picked by arrays."""
        keys = index if isinstance(index, tuple) else (index,)
        view = super().__getitem__(index if any(key is Ellipsis for key in keys) else (*keys, Ellipsis))
        return view if isinstance(view, PinnedArray) and _shared(view, self) else self

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if not isinstance(found, PinnedArray) or not _shared(found, self):
            self._part(index)._accessed("getitem", write=False)
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        _read("setitem", [value])
        self._part(index)._accessed("setitem", write=True)
        super().__setitem__(index, value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        _read(ufunc.__name__, inputs)
        for target in out:
            if isinstance(target, PinnedArray):
                target._accessed(ufunc.__name__, write=True)
        if out:
            kwargs["out"] = tuple(_plain(target) for target in out)
        return getattr(ufunc, method)(*map(_plain, inputs), **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """A function that returns a view has no access, and one that is made of others has theirs."""
        before = _reported.get()
        found = super().__array_function__(func, types, args, kwargs)
        parts = found if isinstance(found, (list, tuple)) else [found]
        if func not in _WRITING and _reported.get() > before:
            return found
        target = args[0] if func in _WRITING else kwargs.get("out")
        views = (part for part in parts if part is not target and _shared(part, self))
        if func not in _VALUELESS and next(views, None) is None:
            _read(func.__name__, [value for value in (*args, *kwargs.values()) if value is not target])
            if isinstance(target, PinnedArray):
                target._accessed(func.__name__, write=True)
        return found


def _read(name: str, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, PinnedArray):
            value._accessed(name, write=False)
        elif isinstance(value, (list, tuple)):
            _read(name, value)


def _shared(a: Any, b: Any) -> bool:
    return np.may_share_memory(_plain(a), _plain(b))


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, PinnedArray) else value


def _reporting(name: str, *, write: bool) -> Callable[..., Any]:
    method = getattr(np.ndarray, name)

    @wraps(method)
    def accessed(self: PinnedArray, *args: Any, **kwargs: Any) -> Any:
        _read(name, args)
        self._accessed(name.strip("_"), write=write)
        return method(_plain(self), *args, **kwargs)

    return accessed


for _name in (*_READS, *_WRITES):
    setattr(PinnedArray, _name, _reporting(_name, write=_name in _WRITES))
