"""Functions of several operators that are launched as one kernel, with exactly the accesses that they make."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.programs.torch_cuda import cuda_answered
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.profiles.vgpu.fused import run_as_one_kernel
from schedbench.profiles.vgpu.gpu import open_vgpu
from tests.profiles.recorders import WindowRecorder


def doubled_into(gpu: VirtualGpu, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Writes twice ``x`` into ``out`` and returns new memory."""
    out.copy_((x + x).contiguous())
    return x + torch.ones(x.shape, device=gpu.device)


def test_a_fused_function_is_one_kernel() -> None:
    sink = WindowRecorder()
    with open_vgpu(load("h200"), sink=sink) as gpu:
        double = partial(run_as_one_kernel, "double", partial(doubled_into, gpu))
        out, x = torch.zeros(3, device=gpu.device), torch.arange(3.0, device=gpu.device)
        result = double(out, x)
        graph = torch.get_device_module(gpu.device).CUDAGraph()
        with torch.get_device_module(gpu.device).graph(graph):
            double(out, x)
        x.add_(1)
        graph.replay()
        assert (out.tolist(), result.tolist()) == ([2, 4, 6], [1, 2, 3])
    assert [op for op in sink.names if "double" in op or "graph" in op] == ["double", "graph[1]"]
    assert "ones" not in sink.names


def test_a_fused_function_may_not_copy_to_the_host() -> None:
    with open_vgpu(load("h200")) as gpu, pytest.raises(RuntimeError, match="length: the function"):
        run_as_one_kernel("length", lambda x: x.sum().item(), torch.ones(3, device=gpu.device))


def test_accesses_of_a_fused_function_are_exact() -> None:
    """A race on the row that the kernel reads is found, and one on another row is not. Memory that only the computation
    on the CPU uses gives no finding."""

    def findings(row: int) -> int:
        with open_vgpu(load("h200"), hazards=True) as gpu, cuda_answered(gpu, load("h200")):
            table, rows = torch.ones(4, 8, device="cuda"), torch.tensor([1], device="cuda")
            side = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                table[row].fill_(3)
            run_as_one_kernel("take", lambda table, rows: (table[rows] * 2).sum(0), table, rows)
            return len(gpu.findings)

    assert (findings(row=1), findings(row=2)) == (1, 0)


def test_the_memory_of_a_fused_functions_result_may_still_be_in_use() -> None:
    with open_vgpu(load("h200"), hazards=True) as gpu, cuda_answered(gpu, load("h200")):
        x, side = torch.ones(64, device="cuda"), torch.cuda.Stream()
        torch.cuda.synchronize()
        old = torch.ones(64, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _ = old + 1
        del old
        _ = run_as_one_kernel("twice", lambda x: x + x, x)
        assert [finding.kind for finding in gpu.findings] == ["freed"]
