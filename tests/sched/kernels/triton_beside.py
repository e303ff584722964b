"""Runs a small workload on the virtual GPU. Beside each op that has one, its Triton kernel runs in the interpreter with
the same arguments: views, padding of graphs, dtypes. Prints the differences by op, as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from schedbench.profiles.platform.resolve import resolve
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.vgpu.executor import tensors_in
from schedbench.scenarios.loader import load
from schedbench.sched.kernels import declare
from schedbench.sched.kernels.declare import triton_kernel
from tests.sched.kernels.triton_cases.case import addressed

SMALL = ("workload.requests=2", "workload.arrival.process=burst", "measure.warmup_requests=0")
PADDED = (
    "swap_in",
    "back_up",
)  # torch's write the padding of caches, row 0, where there is nothing to be moved


def copy_of(arg: Any) -> Any:
    """Returns the same view of a copy of the storage."""
    if isinstance(arg, (list, tuple)):
        return [copy_of(part) for part in arg]
    if not isinstance(arg, torch.Tensor):
        return arg
    view = arg.storage_offset(), arg.shape, arg.stride()
    return torch.empty(0, dtype=arg.dtype).set_(arg.untyped_storage().clone(), *view)


def differ(found: torch.Tensor | None, expected: torch.Tensor | None, *, padded: bool) -> bool:
    if found is None or expected is None or (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return True
    if padded and found.dim() > 2:
        found, expected = found[1:], expected[1:]
    if not found.is_floating_point():
        return not torch.equal(found, expected)
    return not torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


def beside(
    entry: declare.Kernel, launch: Callable[..., Any], calls: Counter[str], wrong: Counter[str]
) -> Callable[..., Any]:
    def impl(*args: Any) -> Any:
        calls[entry.name] += 1
        given = copy_of(args)
        found = launch(*addressed(entry.name, given))
        expected = entry.impl(*args)
        pairs = zip_longest(tensors_in([found, given]), tensors_in([expected, list(args)]))
        wrong[entry.name] += any(differ(a, b, padded=entry.name in PADDED) for a, b in pairs)
        return expected

    return impl


def main(scenario: str, *overrides: str) -> None:
    calls, wrong = Counter[str](), Counter[str]()
    for op, entry in declare.kernels().items():
        if launch := triton_kernel(entry):
            declare._KERNELS[op] = replace(entry, impl=beside(entry, launch, calls, wrong))
    resolved = resolve(load(scenario, [*SMALL, *overrides]))
    result = execute(resolved.with_relay(resolved.relays[-1]), Options(device="vgpu"))
    finished = all(row.status == "finished" for row in result.requests)
    json.dump({"finished": finished, "calls": calls, "wrong": +wrong}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
