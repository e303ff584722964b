"""How an op is run on held tensors: by torch's Python bindings where these take the overload's own arguments, since
they cost up to half a microsecond less than a call of the overload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_FUNCTIONS = ("add", "sub", "mul", "cat", "index_select", "where", "eq", "ne", "lt", "le", "gt", "ge")
_METHODS = ("copy_", "clone", "index_put_", "select", "view")
_INDEX = torch.ops.aten.index.Tensor._op
_SLICE = torch.ops.aten.slice.Tensor._op


def _slice(
    held: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> torch.Tensor:
    if dim == 0:
        return held[start:end:step]
    out: torch.Tensor = _SLICE(held, dim, start, end, step)
    return out


def index(held: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
    """index.Tensor. Python's brackets would make a view of an index without dimensions."""
    if len(indices) == 1 and indices[0].dim():
        return held[indices[0]]
    out: torch.Tensor = _INDEX(held, indices)
    return out


_BINDINGS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in _FUNCTIONS},
    **{name: getattr(torch.Tensor, name) for name in _METHODS},
    "slice": _slice,
}

copy_ = _BINDINGS["copy_"]
clone = _BINDINGS["clone"]
index_put_ = _BINDINGS["index_put_"]


def binding(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """The function that computes this overload."""
    return _BINDINGS.get(func._schema.name.removeprefix("aten::"), func._op)
