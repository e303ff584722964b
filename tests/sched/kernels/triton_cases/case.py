"""A small case of an op, and the parts that cases are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

INT32, INT64 = torch.int32, torch.int64

Arguments = Sequence[Any]
Op = torch._ops.OpOverload


@dataclass(frozen=True)
class Case:
    """``make`` returns the op's arguments, with floating-point ones in the dtype; ``keep`` are those (by position)
    whose dtype is fixed. ``floats`` is False where nothing depends on the dtype. ``variant`` marks code other than that
    of the op's first case, so that it is compiled too. ``host`` is the argument in pinned memory."""

    op: Op
    make: Callable[[], Arguments]
    floats: bool = True
    keep: frozenset[int] = field(default=frozenset())
    variant: bool = False
    host: int | None = None

    def arguments(self, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
        there = [
            placed(arg, dtype if place not in self.keep else None, "cpu" if place == self.host else device)
            for place, arg in enumerate(self.make())
        ]
        if self.host is not None and device == "cuda":
            there[self.host] = there[self.host].pin_memory()
        return there


exact = partial(Case, floats=False)


def placed(arg: Any, dtype: torch.dtype | None, device: str) -> Any:
    if isinstance(arg, (list, tuple)):
        return [placed(part, dtype, device) for part in arg]
    if not isinstance(arg, torch.Tensor):
        return arg
    dtype = dtype if dtype is not None and arg.is_floating_point() else arg.dtype
    # Strides stay what they are: a view of something is one after the move.
    storage = torch.empty_strided(arg.shape, arg.stride(), dtype=dtype, device=device)
    return storage.copy_(arg)


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator)


def table(rows: int, width: int) -> torch.Tensor:
    """Scattered slots, [rows, width] int32."""
    return torch.randint(1, 900, (rows, width), generator=torch.Generator().manual_seed(5)).to(INT32)


def addressed(op: str, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments as a CUDA kernel receives them: with the addresses of cached prefixes, which other devices' runs do
    not upload (``upload_prefix_pointers``)."""
    if op != "write_cache_indices":
        return args
    table, rows, cached, addresses, prefix_lens, *rest = args
    there = torch.zeros_like(addresses)
    there[prefix_lens > 0] = torch.tensor([tensor.data_ptr() for tensor in cached], dtype=INT64).to(
        there.device
    )
    return [table, rows, cached, there, prefix_lens, *rest]
