"""The host's own reads and writes of pinned memory, as far as torch's Python API shows them.

A NumPy view of pinned memory counts as a read when it is made; what is done through it later is not seen. Nor is
``pinned[indices]``: a class that has once had a ``__getitem__`` written in Python is a sequence from then on, to
``torch.tensor`` too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from ..patching import attributes_set
from ..watcher import Watcher
from .memory import DeviceMemory

# fmt: off
_READS = (
    "tolist", "item", "numpy", "clone", "__int__", "__float__", "__bool__", "__index__", "__iter__", "__array__",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__floordiv__", "__mod__",
    "__neg__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__",
    "sum", "mean", "min", "max", "amin", "amax", "argmin", "argmax", "any", "all", "cumsum", "equal", "unique",
    "index_select", "gather", "nonzero", "sort", "where",
)
# fmt: on
_WRITES = ("copy_", "fill_", "zero_", "add_", "sub_", "mul_", "__setitem__")


def host_accesses(
    watcher: Callable[[], Watcher | None], memory: DeviceMemory
) -> AbstractContextManager[None]:
    """For the duration of a block, torch's tensor methods report their accesses to the watcher that is current."""
    methods = [(name, getattr(torch.Tensor, name)) for name in (*_READS, *_WRITES)]
    return attributes_set(
        [(torch.Tensor, name, _reporting(name, method, watcher, memory)) for name, method in methods]
    )


def _reporting(
    name: str, method: Callable[..., Any], watcher: Callable[[], Watcher | None], memory: DeviceMemory
) -> Callable[..., Any]:
    op = name.strip("_") if name.startswith("__") else name

    @wraps(method)
    def patched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A copy from the device is the device's write.
        if not memory.on_device(tensor) and memory.pinned(tensor) and not any(map(memory.on_device, args)):
            current = watcher()
            if current is not None:
                current.host_access(op, tensor, write=name in _WRITES)
        return method(tensor, *args, **kwargs)

    return patched
