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
from ..watcher import Watcher
from .memory import Memory

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
def watched(listener: Callable[[], Watcher | None], memory: Memory) -> Iterator[None]:
    """Torch's tensor methods heard by whoever listens at the time, for the duration of the block."""

    def told(name: str) -> Callable[..., Any]:
        return _told(name, getattr(torch.Tensor, name), listener, memory)

    undo = [replace(torch.Tensor, name, told(name)) for name in (*_READS, *_WRITES)]
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _told(
    name: str, method: Callable[..., Any], listener: Callable[[], Watcher | None], memory: Memory
) -> Callable[..., Any]:
    op = name.strip("_") if name.startswith("__") else name

    @wraps(method)
    def patched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A copy from the device is the device's write.
        if not memory.mine(tensor) and memory.pinned(tensor) and not any(map(memory.mine, args)):
            who = listener()
            if who is not None:
                who.host_access(op, tensor, write=name in _WRITES)
        return method(tensor, *args, **kwargs)

    return patched
