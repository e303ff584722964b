"""Cases of norms, rotation and the activation."""

from __future__ import annotations

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
    return [
        floats(tokens, (heads + 2 * kv_heads) * d),
        positions,
        floats(16, d),
        *norms,
        1e-5,
        slots,
        *caches,
    ]


for _rows, _width in ((1, 12), (3, 64), (0, 16)):
    CASES[f"rms_norm [{_rows}, {_width}]"] = Case(
        rms_norm,
        lambda r=_rows, w=_width: [floats(r, w), floats(w), 1e-5],
    )
    CASES[f"add_rms_norm [{_rows}, {_width}]"] = Case(
        add_rms_norm,
        lambda r=_rows, w=_width: [floats(r, w), floats(r, w, seed=1), floats(w), 1e-5],
    )
    CASES[f"silu_and_mul [{_rows}, {_width}]"] = Case(
        silu_and_mul, lambda r=_rows, w=_width: [4 * floats(r, w)]
    )
for _heads, _kv_heads, _d, _normed in ((4, 1, 8, False), (2, 2, 12, True), (14, 2, 8, False)):
    CASES[f"rope {_heads} heads on {_kv_heads} of {_d}"] = Case(
        rope_and_store_kv,
        lambda h=_heads, k=_kv_heads, d=_d, n=_normed: _rope(3, h, k, d, normed=n),
        keep=frozenset({2}),
        variant=_normed,
    )
