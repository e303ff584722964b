"""Kernels of the probes. Importing this needs Triton, launching one a GPU or Triton's interpreter."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def _add_one(x: tl.tensor, n: tl.tensor, width: tl.constexpr) -> None:
    at = tl.arange(0, width)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def _gather(source: tl.tensor, rows: tl.tensor, target: tl.tensor, n: tl.tensor, width: tl.constexpr) -> None:
    """target[i] = source[rows[i]], rows of ``width`` elements; few programs share n rows."""
    at = tl.arange(0, width)
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        row = tl.load(rows + i)
        tl.store(target + i * width + at, tl.load(source + row * width + at))


def _gather_by_pointer(pointers: tl.tensor, target: tl.tensor, n: tl.tensor, width: tl.constexpr) -> None:
    """As ``_gather`` of float32 rows that lie at the addresses [n] int64."""
    at = tl.arange(0, width)
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        row = tl.load(pointers + i).to(tl.pointer_type(tl.float32))
        tl.store(target + i * width + at, tl.load(row + at))


add_one: Any = triton.jit(_add_one)
gather: Any = triton.jit(_gather)
gather_by_pointer: Any = triton.jit(_gather_by_pointer)
