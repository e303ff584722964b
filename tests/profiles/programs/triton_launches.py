"""Triton kernels on the virtual GPU. Run as a program under TRITON_INTERPRET=1 it prints what each case returns as
JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.programs.torch_cuda import cuda_answered
from schedbench.profiles.programs.triton_kernels import triton_interpreted
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.profiles.vgpu.gpu import open_vgpu
from tests.profiles.recorders import WindowRecorder

CASES: list[Callable[[], Any]] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES.append(function)
    return function


@contextmanager
def opened(**options: Any) -> Iterator[tuple[VirtualGpu, WindowRecorder]]:
    sink = WindowRecorder()
    with (
        open_vgpu(load("h200"), sink=sink, watch=[Path(__file__)], **options) as gpu,
        cuda_answered(gpu, load("h200")),
        triton_interpreted(gpu),
    ):
        yield gpu, sink


@triton.jit
def add_one(out, x, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + 1, mask=inside)


@triton.jit
def scatter(out, rows, x, width: tl.constexpr):
    row, at = tl.load(rows + tl.program_id(0)), tl.arange(0, width)
    tl.store(out + row * width + at, tl.load(x + tl.program_id(0) * width + at))


@triton.jit
def gather_both(rows, floats, whole, out_floats, out_whole):
    row, at = tl.load(rows + tl.program_id(0)), tl.program_id(0)
    tl.store(out_floats + at, tl.load(floats + row) * 2)
    tl.store(out_whole + at, tl.load(whole + row))


@triton.jit
def index_of_sum(out, floats, block: tl.constexpr):
    tl.store(out, tl.sum(tl.load(floats + tl.arange(0, block))).to(tl.int64))


@triton.jit
def decide(out, floats):
    if tl.load(floats) > 0:
        tl.store(out, 1)
    else:
        tl.store(out, 2)


@triton.jit
def count(total, x, block: tl.constexpr):
    tl.atomic_add(total, tl.sum(tl.load(x + tl.program_id(0) * block + tl.arange(0, block))))


@triton.jit
def swap(lock):
    tl.atomic_cas(lock, 0, 7)


@triton.jit
def copy_block(source, target, block: tl.constexpr):
    target.store([block, 0], source.load([0, 0]))


@triton.jit
def sum_by_address(out, addresses, n, block: tl.constexpr):
    at = tl.arange(0, block)
    source = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.int64))
    tl.store(out + tl.program_id(0), tl.sum(tl.load(source + at, mask=at < n, other=0)))


@triton.autotune([triton.Config({"block": 4}), triton.Config({"block": 8})], key=["n"])
@triton.jit
def tuned(out, x, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.load(x + at, mask=at < n) * block, mask=at < n)


@triton.heuristics({"block": lambda args: triton.next_power_of_2(args["n"])})
@triton.jit
def guessed(out, n, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(out + at, at + block, mask=at < n)


def findings(first: Callable[[], object], second: Callable[[], object], gpu: VirtualGpu) -> list[str]:
    """The hazards between ``first`` on a side stream and ``second``, which nothing orders."""
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        first()
    second()
    return [finding.kind for finding in gpu.findings]


@case
def values_and_one_launch() -> Any:
    with opened() as (_, sink):
        x, out = torch.arange(10.0, device="cuda"), torch.zeros(10, device="cuda")
        add_one[(3,)](out, x, 10, block=4)
        add_one[lambda meta: (triton.cdiv(10, meta["block"]),)](out, out, 10, block=4)
        values = out.tolist()
    (op, _) = [op for op in sink.ops if op.name == "add_one"]
    return values, op.end - op.start


@case
def time_grows_with_bytes() -> Any:
    with opened() as (_, sink):
        x = torch.zeros(1 << 20, device="cuda")
        add_one[(1,)](x, x, 1 << 20, block=1 << 20)
    (op,) = [op for op in sink.ops if op.name == "add_one"]
    return op.end - op.start


@case
def masked_lanes_are_no_accesses() -> Any:
    def found(n: int) -> list[str]:
        with opened(hazards=True) as (gpu, _):
            x, out = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
            return findings(lambda: add_one[(1,)](out, x, n, block=8), lambda: out[4:].fill_(1), gpu)

    return found(4), found(5)


@case
def rows_are_exact() -> Any:
    def found(row: int) -> list[str]:
        with opened(hazards=True) as (gpu, _):
            out, x = torch.zeros(6, 4, device="cuda"), torch.ones(2, 4, device="cuda")
            rows = torch.tensor([1, 4], device="cuda")
            return findings(lambda: scatter[(2,)](out, rows, x, width=4), lambda: out[row].sum(), gpu)

    return [found(row) for row in range(6)]


@case
def atomics_write() -> Any:
    with opened(hazards=True) as (gpu, _):
        total, x = torch.zeros(2, device="cuda"), torch.ones(8, device="cuda")
        kinds = findings(lambda: count[(2,)](total, x, block=4), lambda: total[:1] + 1, gpu)
        lock = torch.zeros(1, dtype=torch.int32, device="cuda")
        swap[(1,)](lock)
        torch.cuda.synchronize()
        return kinds, total.tolist(), lock.tolist()


@case
def descriptors() -> Any:
    def found(row: int) -> Any:
        with opened(hazards=True) as (gpu, _):
            x, out = torch.arange(32.0, device="cuda").view(8, 4), torch.zeros(8, 4, device="cuda")

            def launch() -> None:
                source, target = (TensorDescriptor.from_tensor(t, [4, 4]) for t in (x, out))
                copy_block[(1,)](source, target, block=4)

            kinds = findings(launch, lambda: out[row].fill_(9), gpu)
            torch.cuda.synchronize()
            return kinds, out[7].tolist()

    return found(3), found(4)


@case
def memory_by_address() -> Any:
    with opened(hazards=True) as (gpu, _):
        first, second = (torch.arange(n, device="cuda") for n in (3, 3))
        addresses = torch.tensor([first.data_ptr(), second.data_ptr()], device="cuda")
        out = torch.zeros(2, dtype=torch.int64, device="cuda")
        kinds = findings(
            lambda: sum_by_address[(2,)](out, addresses, 3, block=4), lambda: second[2:].fill_(5), gpu
        )
        torch.cuda.synchronize()
        return kinds, out.tolist()


@case
def memory_of_no_tensor() -> Any:
    with opened():
        out, addresses = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.tensor([512], device="cuda")
        try:
            sum_by_address[(1,)](out, addresses, 3, block=4)
        except RuntimeError as error:
            return type(error).__name__, str(error)


@case
def reads_behind_a_tensor_are_within_its_block() -> Any:
    with opened():
        x, out = torch.ones(5, device="cuda"), torch.zeros(8, device="cuda")
        add_one[(1,)](out, x, 8, block=8)
        return out.tolist()


@case
def pinned_and_pageable_memory() -> Any:
    with opened() as (_, sink):
        out, pinned = torch.zeros(4, device="cuda"), torch.ones(4).pin_memory()
        add_one[(1,)](out, pinned, 4, block=4)
        try:
            add_one[(1,)](out, torch.ones(4), 4, block=4)
        except ValueError as error:
            said = str(error)
        values = out.tolist()
    return values, said, [op.host_bytes for op in sink.ops if op.name == "add_one"]


@case
def decorators() -> Any:
    with opened() as (_, sink):
        out = torch.zeros(6, device="cuda")
        tuned[lambda meta: (triton.cdiv(6, meta["block"]),)](out, torch.ones(6, device="cuda"), 6)
        other = torch.zeros(6, dtype=torch.int32, device="cuda")
        guessed[(1,)](other, 6)
        values = out.tolist(), other.tolist()
    return values, [op.name for op in sink.ops if op.name in ("tuned", "guessed")]


def replayed(*, race: bool, **options: Any) -> Any:
    """Replays a graph of a scatter and a torch op twice, with other rows, while a side stream reads row 2."""
    with opened(**options) as (gpu, sink):
        rows, x = torch.tensor([1, 4], device="cuda"), torch.ones(2, 4, device="cuda")
        out, twice = torch.zeros(6, 4, device="cuda"), torch.zeros(6, 4, device="cuda")
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            scatter[(2,)](out, rows, x, width=4)
            twice.copy_(out * 2)
        captured = out.sum().item()
        graph.replay()
        rows.copy_(torch.tensor([2 if race else 3, 0]))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            extra = out[2] + 1
        x.fill_(5)
        graph.replay()
        torch.cuda.synchronize()
        del extra
        result = captured, twice[:, 0].tolist(), [finding.kind for finding in gpu.findings]
    return *result, [op.name for op in sink.ops if op.name.startswith("graph")]


@case
def graphs() -> Any:
    return replayed(race=False)


@case
def graphs_with_hazards() -> Any:
    return [replayed(race=race, hazards=True)[2] for race in (False, True)]


@case
def adversary() -> Any:
    return replayed(race=False, adversary=1)[:2]


@case
def values_none() -> Any:
    with opened(values="none", hazards=True) as (gpu, _):
        out, x = torch.zeros(6, 4, device="cuda"), torch.ones(2, 4, device="cuda")
        rows, total = torch.tensor([1, 4], device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
        kinds = findings(lambda: scatter[(2,)](out, rows, x, width=4), lambda: out[4].sum(), gpu)
        torch.cuda.synchronize()
        count[(1,)](total, rows, block=2)
        try:
            add_one[(1,)](total, x, 1, block=1)
        except RuntimeError as error:
            said = str(error)
        return kinds, total.tolist(), said


@case
def values_apart() -> Any:
    """Without values, integers that do not follow from floats are computed, and others are refused."""
    said = []
    with opened(values="none"):
        rows, whole = torch.tensor([2, 0], device="cuda"), torch.tensor([7, 8, 9], device="cuda")
        floats, out = torch.ones(4, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
        gather_both[(2,)](rows, floats, whole, torch.empty(2, device="cuda"), out)
        torch.cuda.synchronize()
        for launch in (lambda: index_of_sum[(1,)](out, floats, block=4), lambda: decide[(1,)](out, floats)):
            try:
                launch()
            except RuntimeError as error:
                said.append(str(error))
        return out.tolist(), said


@case
def driver() -> Any:
    with opened():
        active = triton.runtime.driver.active
        target = active.get_current_target()
        found = active.utils.get_device_properties(active.get_current_device())
        is_kernel = isinstance(triton.jit(add_one.fn), triton.runtime.jit.JITFunction)
        return target.backend, target.arch, found["multiprocessor_count"], is_kernel


def main() -> None:
    json.dump({function.__name__: function() for function in CASES}, sys.stdout)


if __name__ == "__main__":
    main()
