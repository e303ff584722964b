"""Compiles kernels for batches of several sizes, without a GPU, and prints as JSON which are compiled more than once.
An op may return rows of one block of memory: where the second row begins depends on the batch, and so do the addresses
that one kernel writes to and the next one reads from."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch

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
from tests.sched.kernels.triton_compiled import compiling

SIZES = (4, 1, 2, 3)


def launches(b: int) -> Iterator[tuple[Op, Arguments]]:
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


def main() -> None:
    """A launch is identified by its place in the list, a variant by the hash of the compiled code."""
    made, variants = compiling(), dict[str, set[str]]()
    for b in SIZES:
        for place, (op, arguments) in enumerate(launches(b)):
            made.clear()
            triton_kernel(kernels()[op])(*arguments)
            for kernel in made:
                variants.setdefault(f"{kernel.metadata.name} of launch {place}", set()).add(kernel.hash)
    json.dump({name: len(found) for name, found in variants.items() if len(found) > 1}, sys.stdout)


if __name__ == "__main__":
    main()
