"""The host's own reads and writes of pinned memory, as far as torch's Python API shows them.

A NumPy view of pinned memory is seen when it is made, as a read; what is done through it later is not. Nor is
``pinned[places]``: a class that has once had a ``__getitem__`` of Python's is a sequence for good, to
``torch.tensor`` too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from ..patches import replace
from ..pinned import is_pinned
from ..tensor import CURRENT, DeviceTensor

_READS = (
    *(
        "tolist",
        "item",
        "numpy",
        "clone",
        "__int__",
        "__float__",
        "__bool__",
        "__index__",
        "__iter__",
        "__array__",
    ),
    *(
        "__add__",
        "__radd__",
        "__sub__",
        "__rsub__",
        "__mul__",
        "__rmul__",
        "__truediv__",
        "__floordiv__",
        "__mod__",
    ),
    *("__neg__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__"),
    *(
        "sum",
        "mean",
        "min",
        "max",
        "amin",
        "amax",
        "argmin",
        "argmax",
        "any",
        "all",
        "cumsum",
        "equal",
        "unique",
    ),
    *("index_select", "gather", "nonzero", "sort", "where"),
)
_WRITES = ("copy_", "fill_", "zero_", "add_", "sub_", "mul_", "__setitem__")


@contextmanager
def watched() -> Iterator[None]:
    """Torch's tensor methods heard by the watcher of the virtual GPU that is open, for the duration of the block."""
    undo = [
        replace(torch.Tensor, name, _told(name, getattr(torch.Tensor, name), write=name in _WRITES))
        for name in (*_READS, *_WRITES)
    ]
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _told(name: str, method: Callable[..., Any], *, write: bool) -> Callable[..., Any]:
    @wraps(method)
    def patched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A copy from the device is the device's write.
        if type(tensor) is not DeviceTensor and is_pinned(tensor) and not _from_device(args):
            gpu = CURRENT.get(None)
            if gpu is not None:
                gpu.watcher.host_access(
                    name.strip("_") if name.startswith("__") else name, tensor, write=write
                )
        return method(tensor, *args, **kwargs)

    return patched


def _from_device(args: tuple[Any, ...]) -> bool:
    return any(type(arg) is DeviceTensor for arg in args)
