"""Every kernel of the model: its cost, and what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedbench.sched.kernels import compiled
from schedbench.sched.kernels.attention import PagedQueries, attended, attention, with_branches
from schedbench.sched.kernels.declare import Kernel, Work, kernels
from schedbench.sched.kernels.dense import (
    add_rms_norm,
    linear,
    linear_columns,
    multiplied,
    normalised,
    rms_norm,
    rope_and_store_kv,
    rotated,
    silu_and_mul,
)
from schedbench.sched.kernels.rows import (
    decode_positions,
    embedding,
    extend_positions,
    last_tokens,
    stage_decode,
)
from schedbench.sched.kernels.tags import kv_tags

INT32, INT64, BF16 = torch.int32, torch.int64, torch.bfloat16
# Three requests of 5, 70 and 2 positions; the last 3, 2 and 1 of them are new. 4 heads share 2 of the cache, d = 8.
LENS = torch.tensor([5, 70, 2])
NEW = torch.tensor([3, 2, 1], dtype=INT32)
ROWS = torch.tensor([2, 1, 3])
TABLE = torch.zeros(4, 80, dtype=INT32)
TABLE[2, :5] = torch.arange(1, 6)
TABLE[1, :70] = torch.arange(10, 80)
TABLE[3, :2] = torch.tensor([90, 91])
LOC = torch.tensor([3, 4, 5, 78, 79, 91])


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def positions() -> torch.Tensor:
    return torch.tensor([2, 3, 4, 68, 69, 1])


def attention_args(new: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> list[Any]:
    tokens = 3 if new is None else 6
    q, k, v = (
        floats(tokens, 4, 8, dtype=dtype),
        floats(100, 2, 8, dtype=dtype),
        floats(100, 2, 8, dtype=dtype),
    )
    return [q, k, v, TABLE, ROWS, LENS, new, 0.25, 70, 3 if new is not None else 1]


def rope_args(norm: torch.Tensor | None = None) -> list[Any]:
    caches = [torch.zeros(100, 2, 8), torch.zeros(100, 2, 8)]
    return [floats(6, 64), positions(), floats(80, 8), norm, norm, 1e-5, LOC, *caches]


def tag_args() -> list[Any]:
    pool = [torch.zeros(100, dtype=INT64) for _ in range(2)]
    return [*pool, torch.arange(80), torch.arange(6), TABLE, ROWS, LENS, NEW, LOC]


def staged() -> list[Any]:
    return [torch.full((5, 8), 9), *(torch.arange(3) + i for i in range(5)), 6]


CASES: dict[str, tuple[torch._ops.OpOverload, list[Any]]] = {
    "embedding": (embedding, [torch.tensor([3, 0, 3]), floats(7, 16)]),
    "rms_norm": (rms_norm, [floats(5, 12), floats(12), 1e-5]),
    "add_rms_norm": (add_rms_norm, [floats(5, 12), floats(5, 12), floats(12), 1e-5]),
    "linear": (linear, [floats(19, 12), floats(12, 7), None, torch.float32]),
    "linear with bias": (linear, [floats(3, 12), floats(12, 7), floats(7), torch.float32]),
    "linear of bf16 to float32": (
        linear,
        [floats(3, 12, dtype=BF16), floats(12, 7, dtype=BF16), None, torch.float32],
    ),
    "linear of nothing": (linear, [floats(0, 12), floats(12, 7), None, torch.float32]),
    "linear_columns": (linear_columns, [floats(19, 12), floats(12, 5), [0, 2, 6, 9], 10, torch.float32]),
    "rope_and_store_kv": (rope_and_store_kv, rope_args()),
    "rope_and_store_kv with norms": (rope_and_store_kv, rope_args(floats(8))),
    "attention of an extend": (attention, attention_args(NEW)),
    "attention of a decode": (attention, attention_args(None)),
    "attention in bf16": (attention, attention_args(NEW, BF16)),
    "silu_and_mul": (silu_and_mul, [floats(5, 12)]),
    "last_tokens": (last_tokens, [floats(6, 12), NEW]),
    "decode_positions": (decode_positions, [LENS]),
    "extend_positions": (extend_positions, [LENS, NEW, 6]),
    "kv_tags": (kv_tags, tag_args()),
    "stage_decode": (stage_decode, staged()),
}


def test_attention_reads_the_slots_of_its_requests_and_no_others() -> None:
    accesses = kernels()[attention].footprint(*(args := attention_args(NEW)))

    cache = next(access for access in accesses if access.tensor is args[1])

    assert cache.rows is not None and cache.lens is not None and cache.table is not None
    lengths = zip(cache.rows, cache.lens.tolist(), strict=True)
    slots = [cache.table[row, :length].tolist() for row, length in lengths]
    assert slots == [[*range(1, 6)], [*range(10, 80)], [90, 91]]


WORK = {
    # ids, and each row read and written
    "embedding": Work(3 * 8 + 2 * 3 * 16 * 4),
    "rms_norm": Work(2 * 5 * 12 * 4 + 12 * 4),
    "add_rms_norm": Work(4 * 5 * 12 * 4 + 12 * 4),
    "linear": Work(4 * (19 * 12 + 12 * 7 + 19 * 7), 2 * 19 * 12 * 7, "gemm"),
    "linear with bias": Work(4 * (3 * 12 + 12 * 7 + 7 + 3 * 7), 2 * 3 * 12 * 7, "gemm"),
    "linear of bf16 to float32": Work(2 * (3 * 12 + 12 * 7) + 4 * 3 * 7, 2 * 3 * 12 * 7, "gemm"),
    # of a matrix ten wide, those five that are there
    "linear_columns": Work(4 * (19 * 12 + 12 * 5 + 19 * 5), 2 * 19 * 12 * 5, "gemm"),
    # qkv in and out, one row of angles per token, positions and slots
    "rope_and_store_kv": Work(2 * 6 * 64 * 4 + 6 * 8 * 4 + 6 * 16),
    # q in and out; 77 positions of K, V and the page table; pairs 3+4+5, 69+70, 2
    "attention of an extend": Work(
        2 * 6 * 32 * 4 + 77 * (2 * 2 * 8 * 4 + 4), 4 * 4 * 8 * (12 + 139 + 2), "attention"
    ),
    "attention of a decode": Work(2 * 3 * 32 * 4 + 77 * (2 * 2 * 8 * 4 + 4), 4 * 4 * 8 * 77, "attention"),
    "silu_and_mul": Work(5 * 12 * 4 + 5 * 6 * 4),
    "last_tokens": Work(3 * 4 + 2 * 3 * 12 * 4),
    "decode_positions": Work(2 * 3 * 8),
    "extend_positions": Work(3 * 8 + 3 * 4 + 6 * 8),
    "stage_decode": Work(5 * 3 * 8 + 5 * 6 * 8),
}


@pytest.mark.parametrize("case", WORK)
def test_cost(case: str) -> None:
    op, args = CASES[case]
    kernel: Kernel = kernels()[op]

    assert kernel.cost is not None
    assert kernel.cost(*args) == WORK[case]


@pytest.mark.parametrize("bias", [None, floats(7)])
def test_the_library_product_of_a_device_is_the_same(bias: torch.Tensor | None) -> None:
    args = (floats(19, 12), floats(12, 7), bias, torch.float32)
    torch.testing.assert_close(multiplied(*args), linear(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
def test_columns_of_a_split_product_equal_those_of_the_whole(dtype: torch.dtype) -> None:
    """They are equal bit for bit, wherever the columns are split."""
    x, whole = floats(37, 128, dtype=dtype), floats(128, 200, dtype=dtype)
    product = linear(x, whole, None, dtype)
    for start, stop, again in ((0, 16, 100), (3, 50, 77), (99, 100, 190)):
        places = torch.cat([torch.arange(start, stop), torch.arange(again, 200)])
        columns = linear_columns(x, whole[:, places].contiguous(), [start, stop, again, 200], 200, dtype)
        assert torch.equal(columns, product[:, places])


def test_only_attention_has_a_cost_that_depends_on_values() -> None:
    assert {op for op, _ in CASES.values() if not kernels()[op].fixed_cost} == {attention}


def test_positions_continue_after_the_cached_tokens() -> None:
    assert extend_positions(LENS, NEW, 6).tolist() == positions().tolist()
    assert decode_positions(torch.tensor([5, 1, 0])).tolist() == [4, 0, 0]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (1, 1), (3, 1), (7, 1), (16, 1), (20, 1)])
def test_attention_equals_a_plain_softmax(heads: int, kv_heads: int) -> None:
    q, k_cache, v_cache = floats(6, heads, 8), floats(100, kv_heads, 8), floats(100, kv_heads, 8)
    expected = []
    for token, (request, position) in enumerate([(0, 2), (0, 3), (0, 4), (1, 68), (1, 69), (2, 1)]):
        slots = TABLE[ROWS[request], : position + 1].long()
        k, v = (cache[slots].repeat_interleave(heads // kv_heads, dim=1) for cache in (k_cache, v_cache))
        weights = torch.softmax(torch.einsum("hd,shd->hs", q[token], k) * 0.25, dim=-1)
        expected.append(torch.einsum("hs,shd->hd", weights, v).flatten())

    found = attention(q, k_cache, v_cache, TABLE, ROWS, LENS, NEW, 0.25, 70, 3)
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("branched", [False, True])
def test_compiled_attention_equals_the_torch_ops(
    branched: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    *paged, _, scale, _, _ = attention_args(NEW)
    paged[:3] = [values.to(dtype) for values in paged[:3]]
    queries = PagedQueries(*paged)
    if branched:
        queries = with_branches(queries, torch.tensor([[7, 1], [3, 0], [9, 2]]), LENS - 1, 80)
    args = (queries, NEW.long(), scale, 80)

    with_numba = attended(*args)
    monkeypatch.setattr(compiled, "_compiled", lambda _: None)

    torch.testing.assert_close(with_numba, attended(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("width", [2, 32, 100, 128])
def test_compiled_norms_and_rotations_have_the_bits_of_the_torch_ops(
    width: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, weight = floats(rows, 4 * width).to(dtype), floats(width).to(dtype)
    heads, angles = wide.view(rows, 4, width)[:, :3], floats(rows, width).to(dtype)

    def computed() -> list[torch.Tensor]:
        norms = [normalised(heads[:, 0].contiguous() * scale, weight, 1e-5) for scale in (1e-20, 1.0, 1e10)]
        return [*norms, rotated(heads, angles)]

    with_numba = computed()
    monkeypatch.setattr(compiled, "_compiled", lambda _: None)

    assert all(map(torch.equal, with_numba, computed()))


def test_compiled_attention_reads_something_at_indices_out_of_range() -> None:
    q, k_cache, v_cache = floats(2, 2, 8), floats(100, 1, 8), floats(100, 1, 8)
    table = torch.full((4, 16), 1000, dtype=INT32)

    for rows, lens in (([9, -1], [5, 1 << 40]), ([1, 2], [0, -3])):
        out = attention(q, k_cache, v_cache, table, torch.tensor(rows), torch.tensor(lens), None, 0.25, 16, 1)
        torch.testing.assert_close(out, v_cache[99].repeat(2, 2))


def test_staging_pads_with_harmless_requests() -> None:
    static = torch.full((5, 8), 9)
    ids, where, rows, lens, slots = (torch.tensor([10 * i, 10 * i + 1]) for i in range(1, 6))

    stage_decode(static, ids, where, rows, lens, slots, 4)

    assert static.tolist() == [
        [10, 11, 0, 0, 9, 9, 9, 9],
        [20, 21, 0, 0, 9, 9, 9, 9],
        [30, 31, 0, 0, 9, 9, 9, 9],
        [40, 41, 1, 1, 9, 9, 9, 9],
        [50, 51, 0, 0, 9, 9, 9, 9],
    ]


def test_an_empty_batch_has_no_rows() -> None:
    none = torch.zeros(0, dtype=INT64)
    q, k_cache, v_cache = floats(0, 4, 8), floats(100, 2, 8), floats(100, 2, 8)

    assert attention(q, k_cache, v_cache, TABLE, none, none, None, 0.25, 1, 1).shape == (0, 32)
    assert extend_positions(none, none.int(), 0).shape == (0,)
