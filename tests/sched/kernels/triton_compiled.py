"""Compiles every Triton kernel for an H100 or H200, which needs no GPU, and prints as JSON the failures, and which
kernels are compiled more than once for batches of several sizes. The interpreter accepts code that the compiler
refuses. Results of kernels are not examined here."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from functools import partialmethod
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from schedbench.sched.kernels.allocation import (
    _write_cache_indices,
    alloc_decode_slots,
    alloc_extend_slots,
    decode_inputs,
)
from schedbench.sched.kernels.declare import kernels, triton_kernel
from schedbench.sched.kernels.drafts import _draft_places, draft_topk
from schedbench.sched.kernels.hot_buffers import previous_tokens
from schedbench.sched.kernels.rows import decode_positions
from schedbench.sched.kernels.sampling import sample, sample_greedy, score_tokens
from schedbench.sched.kernels.verify import accept_drafts, build_tree, tree_paths
from tests.sched.kernels.triton_cases.case import INT32, INT64, Arguments, Op
from tests.sched.kernels.triton_parity import CASES

SHARED = 227 << 10  # bytes of shared memory that a block of these GPUs can have
SIZES = (4, 1, 2, 3)  # of batches


class Hopper:
    """A driver that reports the name of a GPU and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def large_attention(tokens: int, *, decode: bool) -> list[Any]:
    """``attention``'s arguments in the shape of an 8B model, without storage."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cache, table = meta(1 << 16, 8, 128), meta(65, 8192, dtype=torch.int32)
    rows, lens = meta(64, dtype=torch.int64), meta(64, dtype=torch.int64)
    new = None if decode else meta(64, dtype=torch.int32)
    return [meta(tokens, 32, 128), cache, cache, table, rows, lens, new, 0.1, 8192, 1 if decode else 8192]


def launches() -> Iterator[tuple[str, str, list[Any]]]:
    """The name, the op and the arguments of each launch: all code of each op once, and attention at full size."""
    seen = set()
    for name, case in CASES.items():
        if case.variant or case.op not in seen:
            seen.add(case.op)
            yield name, kernels()[case.op].name, case.arguments(torch.bfloat16)
    yield "large decode", "attention", large_attention(64, decode=True)
    yield "large extend", "attention", large_attention(8192, decode=False)


def compiling() -> list[Any]:
    """From now on kernels are compiled instead of launched; each adds an entry to the list."""
    driver.set_active(Hopper())
    launch, made = JITFunction.run, []

    def compiled(self: Any, *args: Any, **options: Any) -> Any:
        made.append(launch(self, *args, **{**options, "warmup": True}))
        return made[-1]

    JITFunction.run = partialmethod(compiled)
    return made


def launches_of_batch(b: int) -> Iterator[tuple[Op, Arguments]]:
    """An op may return rows of one block of memory: where the second row begins depends on the batch, and so do the
    addresses that one kernel writes to and the next one reads from."""
    logits, rows, lens = torch.zeros(b, 1300), torch.arange(b), torch.ones(b, dtype=INT64)
    draw = (torch.ones(b, 1), torch.ones(b, dtype=INT32), *torch.ones(2, 4 * b)[:, :b], rows, lens, None)
    table, buffer, wide = torch.zeros(8, 64, dtype=INT32), torch.zeros(8, 64, dtype=INT64), torch.zeros(b, 7)
    candidates = wide.to(INT64)
    _, above = torch.empty((2, b, 5), dtype=INT64)
    yield sample_greedy, (logits, None)
    yield sample, (logits, *draw, False)
    yield sample, (logits, *draw, True)
    yield score_tokens, (logits, *draw, True, rows)
    yield decode_positions, (lens,)
    yield decode_inputs, (buffer[0], rows, lens, table, None, 1)
    yield alloc_extend_slots, (rows, lens, rows, buffer[0, b:], 4, 4)
    yield alloc_decode_slots, (lens, rows, buffer[0, b:], 4)
    yield _write_cache_indices, (table, rows, [], rows, rows, lens, lens, buffer[0, b:])
    yield previous_tokens, (buffer, buffer, buffer[0], rows, lens, 12)
    yield _draft_places, (table, rows, lens, 3, 64)
    yield draft_topk, (logits, 2)
    yield build_tree, (wide, candidates, candidates, rows, 5)
    yield tree_paths, (above, 3)
    yield accept_drafts, (above, above, above, 4)


def failures(made: list[Any]) -> dict[str, str]:
    entries = {entry.name: entry for entry in kernels().values()}
    found = {}
    for name, op, arguments in launches():
        made.clear()
        try:
            triton_kernel(entries[op])(*arguments)
            shared = max((kernel.metadata.shared for kernel in made), default=0)
            if shared > SHARED:
                found[name] = f"{shared} bytes of shared memory"
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
    return found


def compiled_again(made: list[Any]) -> dict[str, int]:
    """A launch is identified by its place in the list, a variant by the hash of the compiled code."""
    variants = dict[str, set[str]]()
    for b in SIZES:
        for place, (op, arguments) in enumerate(launches_of_batch(b)):
            made.clear()
            triton_kernel(kernels()[op])(*arguments)
            for kernel in made:
                variants.setdefault(f"{kernel.metadata.name} of launch {place}", set()).add(kernel.hash)
    return {name: len(found) for name, found in variants.items() if len(found) > 1}


if __name__ == "__main__":
    made = compiling()
    json.dump({"failures": failures(made), "compiled again": compiled_again(made)}, sys.stdout)
