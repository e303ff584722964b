"""Compiles every Triton kernel for an H100 or H200, which needs no GPU, and prints the failures as JSON. The
interpreter accepts code that the compiler refuses. Results of kernels are not examined here."""

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

from schedbench.sched.kernels.declare import kernels, triton_kernel
from tests.sched.kernels.triton_parity import CASES

SHARED = 227 << 10  # bytes of shared memory that a block of these GPUs can have


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


def main() -> None:
    made = compiling()
    entries = {entry.name: entry for entry in kernels().values()}
    found = {}
    for name, op, arguments in launches():
        made.clear()
        try:
            triton_kernel(entries[op])(*arguments)
            shared = max((kernel.metadata.shared for kernel in made), default=0)
            found[name] = "" if shared <= SHARED else f"{shared} bytes of shared memory"
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
