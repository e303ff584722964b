"""Small cases of every op that has a Triton kernel, and what its result may differ by from torch's in float64.

Run as a program under TRITON_INTERPRET=1 it prints what is wrong with each case as JSON; on CUDA the same cases run
through the ops themselves.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from schedbench.sched.kernels.activation import silu_and_mul
from schedbench.sched.kernels.attention import attention
from schedbench.sched.kernels.bridge import decode_inputs, resolve_negative
from schedbench.sched.kernels.buffers import map_newest, map_prompt, previous_tokens, unmap
from schedbench.sched.kernels.drafts import stage_rows
from schedbench.sched.kernels.indexer import index_and_store, select_top_k
from schedbench.sched.kernels.norm import add_rms_norm, rms_norm
from schedbench.sched.kernels.on_cuda import triton_kernel
from schedbench.sched.kernels.placement import copy_pages, place_decode, place_extend
from schedbench.sched.kernels.registry import kernels
from schedbench.sched.kernels.rope import rope_and_store_kv
from schedbench.sched.kernels.rows import decode_positions, extend_positions, last_tokens
from schedbench.sched.kernels.sampling import Draw, sample, sample_greedy, score_tokens
from schedbench.sched.kernels.sparse import page_lookup, sparse_attention, sparse_extend
from schedbench.sched.kernels.staging import stage_decode
from schedbench.sched.kernels.swap import back_up, plan_swap_in, swap_in
from schedbench.sched.kernels.tree_attention import tree_attention

INT32, INT64 = torch.int32, torch.int64
# Half of the last place of a number near 1, some places more for what is summed.
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

Arguments = Sequence[Any]
Op = torch._ops.OpOverload


@dataclass(frozen=True)
class Case:
    """``make`` gives the op's arguments with floating-point ones in the dtype; ``keep`` are those (by place) that are
    of a fixed dtype. ``floats`` off: nothing of it depends on the dtype. ``variant``: other code than the op's first
    case, so that it is compiled too. ``host``: the argument that is in pinned memory."""

    op: Op
    make: Callable[[], Arguments]
    floats: bool = True
    keep: frozenset[int] = field(default=frozenset())
    variant: bool = False
    host: int | None = None

    def arguments(self, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
        placed = [
            _placed(arg, dtype if place not in self.keep else None, "cpu" if place == self.host else device)
            for place, arg in enumerate(self.make())
        ]
        if self.host is not None and device == "cuda":
            placed[self.host] = placed[self.host].pin_memory()
        return placed


def _placed(arg: Any, dtype: torch.dtype | None, device: str) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_placed(part, dtype, device) for part in arg]
    if not isinstance(arg, torch.Tensor):
        return arg
    dtype = dtype if dtype is not None and arg.is_floating_point() else arg.dtype
    # Strides stay what they are: a view of something is one after the move.
    storage = torch.empty_strided(arg.shape, arg.stride(), dtype=dtype, device=device)
    return storage.copy_(arg)


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator)


CASES: dict[str, Case] = {}


def case(name: str, op: Op, make: Callable[[], Arguments], **rest: Any) -> None:
    CASES[name] = Case(op, make, **rest)


def wrong(name: str, dtype: torch.dtype, run: Callable[..., Any], device: str = "cpu") -> str:
    """How the result and the arguments after ``run`` differ from the torch implementation's in float64; "" if they
    do not."""
    chosen = CASES[name]
    given = chosen.arguments(dtype, device)
    # The same rounded numbers, in float64.
    truth = [_placed(arg, torch.float64, "cpu") for arg in chosen.arguments(dtype)]
    expected = kernels()[chosen.op].impl(*truth)
    found = run(*given)
    if device == "cuda":
        torch.cuda.synchronize()
    pairs = [("result", found, expected)]
    pairs += [(f"argument {place}", arg, truth[place]) for place, arg in enumerate(given)]
    judged = ((where, _differ(a, b, dtype)) for where, a, b in pairs)
    return "; ".join(f"{where}: {why}" for where, why in judged if why)


def _differ(found: Any, expected: Any, dtype: torch.dtype) -> str:
    if isinstance(expected, (list, tuple)):
        return "; ".join(filter(None, (_differ(a, b, dtype) for a, b in zip(found, expected, strict=True))))
    if not isinstance(expected, torch.Tensor):
        return "" if found == expected else f"{found} instead of {expected}"
    found = found.cpu()
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if not expected.is_floating_point():
        return "" if torch.equal(found, expected) else f"{found.tolist()} instead of {expected.tolist()}"
    bound = ROUNDING[dtype] * (1 + expected.abs())
    error = ((found.double() - expected.double()).abs() / bound).nan_to_num(
        posinf=float("inf"), nan=float("inf")
    )
    same = found.double() == expected.double()  # infinities
    return (
        "" if bool((same | (error <= 1)).all()) else f"off by {error[~same].max():.3g} times what is allowed"
    )


def names(*, every: bool = True) -> Iterator[tuple[str, torch.dtype]]:
    """Cases in each dtype; if not ``every``, one case of each op in each dtype and the others in float32."""
    seen = set()
    for name, chosen in CASES.items():
        whole = chosen.floats and (every or chosen.op not in seen)
        seen.add(chosen.op)
        for dtype in ROUNDING if whole else (torch.float32,):
            yield name, dtype


def main() -> None:
    found = {}
    for name, dtype in names(every=False):
        entry = kernels()[CASES[name].op]
        try:
            found[f"{name} {dtype}"] = wrong(name, dtype, triton_kernel(entry.name, entry.triton))
        except Exception:
            found[f"{name} {dtype}"] = traceback.format_exc(limit=-6)
    json.dump(found, sys.stdout)


# --- the cases


def _rope(tokens: int, heads: int, kv_heads: int, d: int, *, normed: bool) -> Arguments:
    norms = [1 + floats(d) / 4, 1 + floats(d, seed=1) / 4] if normed else [None, None]
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:tokens]
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
    case(
        f"rms_norm [{_rows}, {_width}]",
        rms_norm,
        lambda r=_rows, w=_width: [floats(r, w), floats(w), 1e-5],
    )
    case(
        f"add_rms_norm [{_rows}, {_width}]",
        add_rms_norm,
        lambda r=_rows, w=_width: [floats(r, w), floats(r, w, seed=1), floats(w), 1e-5],
    )
    case(f"silu_and_mul [{_rows}, {_width}]", silu_and_mul, lambda r=_rows, w=_width: [4 * floats(r, w)])
for _heads, _kv_heads, _d, _normed in ((4, 1, 8, False), (2, 2, 12, True), (14, 2, 8, False)):
    case(
        f"rope {_heads} heads on {_kv_heads} of {_d}",
        rope_and_store_kv,
        lambda h=_heads, k=_kv_heads, d=_d, n=_normed: _rope(3, h, k, d, normed=n),
        keep=frozenset({2}),
        variant=_normed,
    )


def _paged(lens: Sequence[int], kv_heads: int, d: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Caches, and table, rows and lengths of requests whose slots lie anywhere."""
    count, context = len(lens), max(*lens, 1) + 3
    slots = torch.randperm(count * context, generator=torch.Generator().manual_seed(2)) + 1
    table = torch.cat([torch.zeros(2, context), slots.view(count, context)]).to(INT32)
    rows = torch.arange(count).flip(0) + 2
    caches = [floats(count * context + 1, kv_heads, d, seed=place) for place in range(2)]
    return caches, [table, rows, torch.tensor(lens)]


def _attention(
    lens: Sequence[int], new: Sequence[int] | None, heads: int, kv_heads: int, d: int
) -> Arguments:
    caches, where = _paged(lens, kv_heads, d)
    extend_lens = None if new is None else torch.tensor(new, dtype=INT32)
    tokens = len(lens) if new is None else sum(new)
    bounds = [max(lens), max(new, default=1) if new else 1]
    return [floats(tokens, heads, d), *caches, *where, extend_lens, d**-0.5, *bounds]


def _tree(lens: Sequence[int], depth: int) -> Arguments:
    """Two tokens of each request, one behind the other in its tree."""
    caches, (table, rows, seq_lens) = _paged(lens, 1, 8)
    each = [tensor.repeat_interleave(2) for tensor in (rows, seq_lens)]
    branch_lens = torch.tensor([1, 2] * len(lens))
    branches = torch.randint(1, 9, (2 * len(lens), depth), generator=torch.Generator().manual_seed(3))
    return [floats(2 * len(lens), 2, 8), *caches, table, *each, branches, branch_lens, 0.3, max(lens)]


def _sparse(lens: Sequence[int], k: int) -> Arguments:
    caches, (table, _, seq_lens) = _paged([*lens, k], 2, 8)
    locations = table[2 : 2 + len(lens), :k].contiguous()
    return [floats(len(lens), 4, 8), *caches, locations, seq_lens[: len(lens)], 0.3]


for _heads, _kv_heads, _d, _lens in ((4, 4, 8, (5,)), (4, 1, 16, (300, 1, 64)), (14, 2, 12, (7, 130))):
    case(
        f"decode of {_lens} by {_heads} heads on {_kv_heads}",
        attention,
        lambda h=_heads, k=_kv_heads, d=_d, n=_lens: _attention(n, None, h, k, d),
    )
for _lens, _new in (((5,), (5,)), ((70, 40, 3), (3, 40, 1)), ((2, 150), (1, 67))):
    for _heads, _kv_heads in ((2, 2), (4, 1), (3, 1)):
        case(
            f"extend by {_new} to {_lens} by {_heads} heads on {_kv_heads}",
            attention,
            lambda h=_heads, k=_kv_heads, n=_lens, m=_new: _attention(n, m, h, k, 8),
            variant=_new == (5,) and _heads == 2,
        )
case("tree attention", tree_attention, lambda: _tree((4, 150, 2), 3))
case("sparse attention", sparse_attention, lambda: _sparse((3, 40, 8), 8))


def _vocab_mask(rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator)
    return (bits | 1).to(INT32)


def _packed(*columns: torch.Tensor) -> list[torch.Tensor]:
    """Columns [n] as views of one tensor, as parameters of requests arrive on the device."""
    return list(torch.stack(columns, 1).unbind(1))


def _draw(vocab: int, *, masked: bool, filtered: bool) -> Draw:
    """Six rows, one of them greedy, one with equals only; filters of all kinds, alone and together."""
    logits = 3 * floats(6, vocab)
    logits[4] = (3 * floats(vocab, seed=1)).round()
    temperatures, top_ps, min_ps = _packed(
        torch.tensor([1.0, 0.0, 0.7, 1.3, 1.0, 2.0]),
        torch.tensor([1.0, 0.9, 1.0, 0.8, 0.6, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0, 0.1]),
    )
    keys = _packed(
        torch.tensor([3, -5, 1 << 62, -(1 << 63), 0, 77]), torch.tensor([0, 9, 4095, 1, 2, 100000])
    )
    return Draw(
        logits,
        temperatures.unsqueeze(1),
        torch.tensor([vocab, vocab, 5, vocab, 7, 1], dtype=INT32),
        top_ps,
        min_ps,
        *keys,
        _vocab_mask(6, vocab) if masked else None,
        filtered=filtered,
    )


def _scored(vocab: int, *, masked: bool, filtered: bool) -> Arguments:
    draw = _draw(vocab, masked=masked, filtered=filtered)
    return [*draw, sample(*draw)]


case("greedy with equals", sample_greedy, lambda: [(3 * floats(3, 2500)).round(), None])
case("greedy of those allowed", sample_greedy, lambda: [floats(1, 70), _vocab_mask(1, 70)])
for _vocab, _masked, _filtered in (
    (1500, False, False),
    (37, True, False),
    (1300, True, True),
    (80, False, True),
):
    _what = f"{_vocab} ids{', masked' * _masked}{', filtered' * _filtered}"
    for _op, _make in ((sample, _draw), (score_tokens, _scored)):
        case(
            f"{_op.__name__.removesuffix('.default')} of {_what}",
            _op,
            lambda n=_vocab, m=_masked, f=_filtered, make=_make: make(n, masked=m, filtered=f),
            keep=frozenset({1, 3, 4}),
            variant=_masked and _filtered,
        )


def _table(rows: int, width: int) -> torch.Tensor:
    return torch.randint(1, 900, (rows, width), generator=torch.Generator().manual_seed(5)).to(INT32)


def _place_decode(lens: Sequence[int], page_size: int) -> Arguments:
    rows, seq_lens = torch.arange(len(lens)).flip(0) + 1, torch.tensor(lens)
    free_pages = torch.arange(40, 40 + sum(length % page_size == 0 for length in lens)).flip(0)
    return [_table(len(lens) + 1, 12), rows, seq_lens, seq_lens.to(INT32) - 1, free_pages, page_size]


def _place_extend(prefixes: Sequence[int], lens: Sequence[int], page_size: int) -> Arguments:
    rows, prefix_lens, seq_lens = torch.arange(len(lens)) + 1, torch.tensor(prefixes), torch.tensor(lens)
    opened = sum(-(-n // page_size) - -(-m // page_size) for m, n in zip(prefixes, lens, strict=True))
    prefix = torch.arange(sum(prefixes)) * 3 + 7
    new = sum(lens) - sum(prefixes)
    free_pages = torch.arange(60, 60 + opened).flip(0)
    return [_table(len(lens) + 1, 700), rows, prefix, prefix_lens, seq_lens, free_pages, page_size, new]


def _inputs(lens: Sequence[int], *, pages: bool) -> Arguments:
    rows, table = torch.arange(len(lens)).flip(0) + 1, _table(len(lens) + 1, 600)
    own = torch.zeros_like(table) if pages else None
    return [torch.arange(900, 920), rows, torch.tensor(lens), table, own, 600]


for _lens in ((7,), (1, 8, 3, 4)):
    for _page_size in (1, 4):
        case(
            f"place {len(_lens)} tokens in pages of {_page_size}",
            place_decode,
            lambda n=_lens, p=_page_size: _place_decode(n, p),
            floats=False,
        )
for _prefixes, _lens, _page_size in (((0,), (5,), 1), ((3, 0, 8, 5), (9, 2, 600, 6), 4), ((0, 2), (1, 3), 1)):
    case(
        f"place prompts of {_lens} behind {_prefixes} in pages of {_page_size}",
        place_extend,
        lambda m=_prefixes, n=_lens, p=_page_size: _place_extend(m, n, p),
        floats=False,
    )
case("decode inputs", decode_inputs, lambda: _inputs((3, 1, 0), pages=False), floats=False)
case("inputs and pages", decode_inputs, lambda: _inputs((3, 530), pages=True), floats=False, variant=True)
case(
    "copy pages",
    copy_pages,
    lambda: [_table(3, 9) * 0, _table(3, 9), torch.tensor([2]), torch.tensor([7]), 9],
    floats=False,
)
case("decode positions", decode_positions, lambda: [torch.tensor([4, 0, 300])], floats=False)
case(
    "extend positions",
    extend_positions,
    lambda: [torch.tensor([4, 300, 9]), torch.tensor([4, 270, 1], dtype=INT32), 275],
    floats=False,
)
case("last tokens", last_tokens, lambda: [floats(8, 12), torch.tensor([3, 4, 1], dtype=INT32)])
case(
    "stage a decode",
    stage_decode,
    lambda: [torch.full((5, 9), 7), *(torch.arange(3) + place for place in range(5)), 6],
    floats=False,
)
case("stage rows", stage_rows, lambda: [_table(6, 5), torch.arange(15).view(3, 5), 4], floats=False)
case(
    "resolve placeholders",
    resolve_negative,
    lambda: [torch.tensor([5, -3, 0, -1]), torch.arange(20, 30)],
    floats=False,
)


def _hot(size: int, rows: int, *, top_k: int) -> Arguments:
    """Buffers whose tokens and order are anyhow; a long request, one that has all it wants, a short one, padding."""
    dice = torch.Generator().manual_seed(6)
    tokens = torch.stack([torch.randperm(3 * size, generator=dice)[:size] for _ in range(rows)]).to(INT32)
    order = torch.stack([torch.randperm(size, generator=dice) for _ in range(rows)]).to(torch.int16)
    lens = torch.tensor([3 * size + 1, 3 * size, size - 1, 1])
    chosen = [
        torch.randperm(3 * size, generator=dice)[: top_k - 1],
        tokens[1, :top_k],
        torch.arange(top_k // 2),
    ]
    chosen = [torch.cat([chosen[0], lens[:1] - 1]), *chosen[1:], torch.zeros(1)]
    positions = torch.full((4, top_k), -1)
    for row, some in zip(positions, chosen, strict=True):
        row[: len(some)] = some.sort().values
    buffer = torch.arange(rows * (size + 4)).view(rows, -1).flip(0)
    where = [torch.tensor([3, 1, 2, 0]), lens, buffer]
    return [positions.to(INT32), *where, tokens, order, torch.tensor([5, 7]), 3 * size + 1]


def _fetched() -> Arguments:
    missing = torch.tensor([[4, -1, 9], [-1, -1, -1], [0, 7, -1]], dtype=INT32)
    targets = torch.where(missing >= 0, torch.arange(9).view(3, 3) + 1, 0).to(INT32)
    host = floats(40, 2, 2, 2, 6)
    host[0] = 0
    host_slots = torch.randperm(39, generator=torch.Generator().manual_seed(7))[:36].view(3, 12) + 1
    caches = [torch.zeros(20, 2, 6), torch.zeros(20, 2, 6)]
    return [*caches, host[:, 1], host_slots, torch.tensor([2, 0, 1]), missing, targets]


def _saved() -> Arguments:
    caches = [[floats(12, 2, 6, seed=layer) for layer in range(start, start + 3)] for start in (0, 3)]
    for cache in (*caches[0], *caches[1]):
        cache[0] = 0
    slots, host_slots = torch.tensor([7, -1, 3]), torch.tensor([2, 5, 8])
    return [*caches, torch.zeros(10, 3, 2, 2, 6), slots, host_slots]


for _size, _top_k in ((12, 8), (1100, 40)):
    case(
        f"plan of {_top_k} in buffers of {_size}",
        plan_swap_in,
        lambda s=_size, k=_top_k: _hot(s, 5, top_k=k),
        floats=False,
    )
case("swap in", swap_in, _fetched, host=2)
case("back up", back_up, _saved, host=2)


def _select(lens: Sequence[int], top_k: int, *, ties: bool) -> Arguments:
    (cache, _), where = _paged(lens, 1, 12)
    q = -torch.ones(len(lens), 3, 12) if ties else floats(len(lens), 3, 12)
    keys = torch.ones_like(cache[:, 0]) if ties else cache[:, 0].contiguous()
    return [q, floats(len(lens), 3), keys, *where, top_k, max(lens)]


def _sparse_extend(lens: Sequence[int], new: Sequence[int], *, mapped: bool) -> Arguments:
    caches, (table, rows, seq_lens) = _paged(lens, 1, 8)
    slots, tokens = caches[0].shape[0], sum(new)
    mapping = torch.randperm(slots, generator=torch.Generator().manual_seed(8)) if mapped else None
    where = [torch.arange(n - m, n) for n, m in zip(lens, new, strict=True)]
    index = [floats(tokens, 3, 12), floats(tokens, 3), floats(slots, 12)]
    rest = [table, mapping, rows, torch.cat(where), seq_lens, torch.tensor(new, dtype=INT32)]
    return [floats(tokens, 2, 8), *caches, *index, *rest, 0.3, 6, max(lens)]


for _lens, _ties in (((30,), False), ((1, 1200, 8, 9), False), ((40, 3), True)):
    case(
        f"best of {_lens}{', all equal' * _ties}",
        select_top_k,
        lambda n=_lens, t=_ties: _select(n, 8, ties=t),
    )
case("sparse extend", sparse_extend, lambda: _sparse_extend((9, 70), (4, 3), mapped=False))
case("sparse extend elsewhere", sparse_extend, lambda: _sparse_extend((9,), (9,), mapped=True), variant=True)
case(
    "index and store",
    index_and_store,
    lambda: [floats(2, 4 * 12 + 3), torch.tensor([7, 4]), floats(9, 12), 3],
)
case(
    "page lookup",
    page_lookup,
    lambda: [torch.tensor([[3, 5, -1], [-1, -1, -1]], dtype=INT32), _table(4, 9), torch.tensor([2, 1])],
    floats=False,
)


def _newest() -> Arguments:
    """Rows, lengths and a buffer for 12 tokens in pages of 4."""
    return [
        torch.tensor([2, 1, 3]),
        torch.tensor([5, 13, 30]),
        torch.randperm(64, generator=torch.Generator().manual_seed(9)).view(4, 16),
    ]


def _mapped(page_size: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A mapping of whole pages, and logical slots that lead there."""
    pages = torch.randperm(400 // page_size, generator=torch.Generator().manual_seed(9))
    mapping = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
    logical = pages.flip(0)[: -(-tokens // page_size), None] * page_size + torch.arange(page_size)
    return mapping, logical.flatten()[:tokens]


def _prompt(page_size: int) -> Arguments:
    _, slots = _mapped(page_size, 11)
    return [
        torch.zeros(400, dtype=INT64),
        torch.cat([slots, slots[:1] * 0 + 396]),
        torch.arange(30).flip(0),
        page_size,
    ]


for _page_size in (1, 4):
    case(
        f"map a prompt in pages of {_page_size}",
        map_prompt,
        lambda p=_page_size: _prompt(p),
        floats=False,
    )
    case(
        f"unmap pages of {_page_size}",
        unmap,
        lambda p=_page_size: [*_mapped(p, 150), p],
        floats=False,
    )
case(
    "map the newest",
    map_newest,
    lambda: [torch.zeros(30, dtype=INT64), torch.tensor([4, 9, 7]), _newest()[2], *_newest()[:2], 12],
    floats=False,
)
case(
    "previous tokens",
    previous_tokens,
    lambda: [_newest()[2], torch.arange(160).view(4, 40), torch.tensor([0, 12, 3, 2]), *_newest()[:2], 12],
    floats=False,
)


if __name__ == "__main__":
    main()
