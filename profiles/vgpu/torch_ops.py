"""Torch's operators: how each is run on held tensors, and its kind (view, factory, read by the host, write).

An op is run by torch's Python bindings where these take the overload's own arguments, since they cost up to half a
microsecond less than a call of the overload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...sched.kernels.arrays import array_of, kept_array, tensor_of

_FUNCTIONS = ("sub", "mul", "cat", "index_select", "where", "eq", "ne", "lt", "le", "gt", "ge")
_METHODS = ("copy_", "clone", "select", "view")
_INTEGERS = frozenset({torch.int32, torch.int64})
_FEW = 4096  # elements
_INDEX = torch.ops.aten.index.Tensor._op
_INDEX_PUT = torch.ops.aten.index_put_.default._op
_SLICE = torch.ops.aten.slice.Tensor._op


def add(held: torch.Tensor, other: Any, **options: Any) -> torch.Tensor:
    """add.Tensor and its other overloads."""
    if type(other) is not int or options or held.dim() != 1 or not _few_integers(held, ()) or held.is_meta:
        return torch.add(held, other, **options)
    return tensor_of(array_of(held) + other)  # in the same time, and the sum's array is there for the next op


def _slice(
    held: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> torch.Tensor:
    if dim == 0:
        return held[start:end:step]
    out: torch.Tensor = _SLICE(held, dim, start, end, step)
    return out


def index(held: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
    """index.Tensor. Python's brackets would make a view of an index without dimensions."""
    if len(indices) != 1 or not indices[0].dim():
        out: torch.Tensor = _INDEX(held, indices)
        return out
    if held.dim() != 1 or not _few_integers(held, indices):
        return held[indices[0]]
    try:
        # Of what a step gathers by the batch's rows, it also scatters.
        return tensor_of(kept_array(held)[kept_array(indices[0])])
    except IndexError:  # torch's own follows
        return held[indices[0]]


def index_put_(held: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool) -> None:
    """index_put_.default."""
    # NumPy also takes values of more dimensions.
    fits = values.dtype is held.dtype and values.dim() <= held.dim()
    if accumulate or not fits or not _few_integers(held, indices):
        _INDEX_PUT(held, indices, values, accumulate)
        return
    try:
        kept_array(held)[tuple([array_of(part) for part in indices])] = array_of(values)
    except (IndexError, ValueError):  # torch's own follows
        _INDEX_PUT(held, indices, values, accumulate)


def _few_integers(held: torch.Tensor, indices: Sequence[Any]) -> bool:
    """Whether NumPy does the same in a third of torch's time."""
    if held.dtype not in _INTEGERS:
        return False
    for part in indices:  # noqa: SIM110  (a generator takes longer)
        if part is None or part.dtype is not torch.int64 or part.numel() > _FEW:
            return False
    return True


_BINDINGS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in _FUNCTIONS},
    **{name: getattr(torch.Tensor, name) for name in _METHODS},
    "add": add,
    "slice": _slice,
    "index_put_": index_put_,
}

cat = _BINDINGS["cat"]
copy_ = _BINDINGS["copy_"]
clone = _BINDINGS["clone"]


def binding(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """The function that computes this overload."""
    return _BINDINGS.get(func._schema.name.removeprefix("aten::"), func._op)


Handler = Callable[[Sequence[Any], Mapping[str, Any]], Any]

MASKS = (torch.bool, torch.uint8)
COUNT_BYTES = 4  # of the number of true elements, as CUB counts them

# Factories that take a tensor, with how the new tensor is filled from the remaining arguments.
LIKES: Mapping[str, Callable[[torch.Tensor, Sequence[Any]], object]] = {
    "empty_like": lambda t, _: t,
    "new_empty": lambda t, _: t,
    "new_empty_strided": lambda t, _: t,
    "zeros_like": lambda t, _: t.zero_(),
    "new_zeros": lambda t, _: t.zero_(),
    "ones_like": lambda t, _: t.fill_(1),
    "new_ones": lambda t, _: t.fill_(1),
    "full_like": lambda t, rest: t.fill_(rest[0]),
    "new_full": lambda t, rest: t.fill_(rest[1]),
    "rand_like": lambda t, _: t.uniform_(),
    "randn_like": lambda t, _: t.normal_(),
}

# Ops whose result, or whose result's shape, the host needs: the bytes of each number that it reads.
READS: Mapping[str, Sequence[int]] = {
    "nonzero": (COUNT_BYTES,),
    "masked_select": (COUNT_BYTES,),
    "_unique2": (8,),
    "unique_dim": (8,),
    "unique_consecutive": (8,),
    "repeat_interleave": (8,),
    "bincount": (8, 8),
    "histc": (4, 4),
    "equal": (1,),
    "allclose": (1,),
    "multinomial": (1, 1),
    "_linalg_check_errors": (1,),
}

# Ops that torch composes of others on every device, with copies that they hide: most copy their argument and change the
# copy in place; others read numbers from tensors.
COMPOSED = frozenset(
    {
        "block_diag",
        "constant_pad_nd",
        "index_fill",
        "index_put",
        "linspace",
        "logspace",
        "masked_fill",
        "masked_scatter",
        "put",
        "repeat",
    }
)

# Ops that change the geometry of a tensor in place, and no values.
RESHAPES = frozenset(
    {"as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "t_", "transpose_", "unsqueeze_"}
)

_VIEWS_BY_NAME = frozenset({"_unsafe_view", "lift_fresh", "detach", "alias"})


def reads_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """The bytes of each number that this call reads."""
    given = {**dict(zip(("input", "bins", "min", "max"), args, strict=False)), **kwargs}
    known_range = name == "histc" and given.get("min", 0) != given.get("max", 0)
    return () if known_range or kwargs.get("output_size") is not None else READS[name]


def composition(func: torch._ops.OpOverload) -> torch._C.DispatchKey | None:
    """The dispatch key of torch's definition of the op by other ops, if that is how CUDA runs it.

    Torch replaces an op that is composite for autograd, too, before it is dispatched to the tensor's class, but not
    under ``inference_mode``.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    if has_kernel(name, "PrivateUse1"):
        return None
    if has_kernel(name, "CompositeImplicitAutograd"):
        return torch._C.DispatchKey.CompositeImplicitAutograd
    is_known = name.removeprefix("aten::").split(".")[0] in COMPOSED
    is_known = is_known and has_kernel(name, "CompositeExplicitAutograd")  # not the variant with ``out``
    return torch._C.DispatchKey.CompositeExplicitAutograd if is_known else None


def is_view(schema: torch.FunctionSchema) -> bool:
    """Whether the op returns a view of its first argument's memory."""
    name = schema.name.split("::")[1]
    return name in _VIEWS_BY_NAME or any(r.alias_info and not r.alias_info.is_write for r in schema.returns)


def written_arguments(schema: torch.FunctionSchema) -> list[tuple[int, str]]:
    """Position and name of each argument that the op writes."""
    arguments = enumerate(schema.arguments)
    return [(k, a.name) for k, a in arguments if a.alias_info and a.alias_info.is_write]
