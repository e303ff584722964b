"""Kinds of torch's operators: which return views, which allocate, which make the host wait, which write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

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
    "equal": (1,),
    "allclose": (1,),
    "multinomial": (1, 1),
}

_VIEWS_BY_NAME = frozenset({"_unsafe_view", "lift_fresh", "detach", "alias"})


def is_view(schema: torch.FunctionSchema) -> bool:
    """Whether the op returns a view of its first argument's memory."""
    name = schema.name.split("::")[1]
    return name in _VIEWS_BY_NAME or any(r.alias_info and not r.alias_info.is_write for r in schema.returns)


def written_arguments(schema: torch.FunctionSchema) -> list[tuple[int, str]]:
    """Position and name of each argument that the op writes."""
    arguments = enumerate(schema.arguments)
    return [(k, a.name) for k, a in arguments if a.alias_info and a.alias_info.is_write]
