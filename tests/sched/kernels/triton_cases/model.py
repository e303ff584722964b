"""Cases of norms, rotation and the activation."""

from __future__ import annotations

from functools import partial

import torch

from schedbench.sched.kernels.dense import add_rms_norm, rms_norm, rope_and_store_kv, silu_and_mul
from tests.sched.kernels.triton_cases.case import Arguments, Case, floats

CASES: dict[str, Case] = {}


def _rope(tokens: int, heads: int, kv_heads: int, d: int, *, normed: bool) -> Arguments:
    norms = [1 + floats(d) / 4, 1 + floats(d, seed=1) / 4] if normed else [None, None]
    # A column of a table, as drafting writes: kernels that need contiguous rows get a copy.
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(1)).view(10, 2)[:tokens, 0]
    caches = [torch.zeros(20, kv_heads, d), torch.zeros(20, kv_heads, d)]
    positions = torch.arange(tokens) * 5 % 7
    qkv = floats(tokens, (heads + 2 * kv_heads) * d)
    return [qkv, positions, floats(16, d), *norms, 1e-5, slots, *caches]


for _shape in ((1, 12), (3, 64), (0, 16)):
    CASES[f"rms_norm {[*_shape]}"] = Case(rms_norm, lambda of=_shape: [floats(*of), floats(of[1]), 1e-5])
    CASES[f"add_rms_norm {[*_shape]}"] = Case(
        add_rms_norm, lambda of=_shape: [floats(*of), floats(*of, seed=1), floats(of[1]), 1e-5]
    )
    CASES[f"silu_and_mul {[*_shape]}"] = Case(silu_and_mul, lambda of=_shape: [4 * floats(*of)])
for _heads, _kv_heads, _d, _normed in ((4, 1, 8, False), (2, 2, 12, True), (14, 2, 8, False)):
    CASES[f"rope {_heads} heads on {_kv_heads} of {_d}"] = Case(
        rope_and_store_kv,
        partial(_rope, 3, _heads, _kv_heads, _d, normed=_normed),
        keep=frozenset({2}),
        variant=_normed,
    )
