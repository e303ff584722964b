"""Packages that are not installed: what a program can do with them, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Any

import pydantic
import pytest
import torch

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.programs.hollow import HollowKernelError, HollowPackages, hollow_packages
from schedbench.profiles.programs.torch_cuda import cuda_answered
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.profiles.vgpu.gpu import open_vgpu
from tests.profiles.recorders import WindowRecorder

NAME = "absent_kernels"


@pytest.fixture
def hollow() -> Iterator[HollowPackages]:
    with hollow_packages([NAME, "json"]) as packages:
        yield packages


@pytest.fixture
def absent(hollow: HollowPackages) -> Any:
    assert hollow.names == {NAME}
    return import_module(NAME)


def test_only_absent_packages_are_hollow(hollow: HollowPackages) -> None:
    assert import_module("json").loads("[]") == []
    import_module(f"{NAME}.gemm.fp8")
    assert hollow.imported == {NAME, f"{NAME}.gemm", f"{NAME}.gemm.fp8"}


def test_a_compiled_part_is_hollow_without_an_import_of_its_package() -> None:
    assert "wave" not in sys.modules
    with hollow_packages(["wave.compiled"]) as hollow:
        assert hollow.names == {"wave.compiled"} and "wave" not in sys.modules


def test_a_hollow_package_has_usable_attributes(hollow: HollowPackages, absent: Any) -> None:
    def function() -> int:
        return 1

    class Mixed(absent.Base, torch.nn.Module):  # type: ignore[misc]
        pass

    class Alone(absent.Base, frozen=True):  # type: ignore[misc]
        pass

    class Model(pydantic.BaseModel):
        field: absent.Kind
        other: absent.Kind | None = None

    assert (absent.jit(function)(), absent.jit(level=3)(function)()) == (1, 1)
    assert Mixed().training and Alone(1, two=2) is not None
    assert Model(field=3).field == 3
    assert not absent.flag and list(absent.items) == [] and not isinstance(1, absent.Kind)
    assert not absent.sm_version() >= 90
    assert copy.copy(absent.thing)._hollow_name == copy.deepcopy(absent.thing)._hollow_name
    with pytest.raises(ZeroDivisionError):
        try:
            raise ZeroDivisionError
        except absent.KernelError:
            pass
    assert hollow.used == {f"{NAME}.jit", f"{NAME}.jit()", f"{NAME}.sm_version"}


def test_versions_are_high(absent: Any) -> None:
    assert absent.__version__ == metadata.version("absent-kernels") == "9999.0.0"
    assert importlib.util.find_spec(NAME) is not None
    assert NAME not in metadata.packages_distributions()


def test_transformers_reports_a_hollow_package_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "transformers.utils.import_utils"
    import_module(listed)

    def available() -> bool:
        import_module(NAME)
        found = import_module(listed)._is_package_available(NAME)
        return bool(found[0] if isinstance(found, tuple) else found)

    with hollow_packages([NAME]):
        assert not available()
    monkeypatch.delitem(sys.modules, listed)
    with hollow_packages([NAME]):
        assert not available()


def test_imports_are_restored_afterwards() -> None:
    before = list(sys.meta_path), torch.library.register_fake
    with hollow_packages([NAME]):
        import_module(NAME)
    assert (list(sys.meta_path), torch.library.register_fake) == before
    with pytest.raises(ImportError):
        import_module(NAME)


def test_ops_of_a_hollow_package(hollow: HollowPackages) -> None:
    @torch.library.register_fake(f"{NAME}::norm")
    def shape(x: torch.Tensor) -> torch.Tensor:
        return x

    torch.library.register_fake(f"{NAME}::norm", shape)
    assert hollow.used == {f"torch.library.register_fake({NAME}::norm)"}
    assert getattr(torch.ops, NAME).norm.default(1) is not None
    with pytest.raises(AttributeError):
        _ = torch.ops.another_package.norm
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.library.register_fake("another_package::norm", shape)


def test_a_kernel_of_a_hollow_package_is_refused(hollow: HollowPackages, absent: Any) -> None:
    op = getattr(torch.ops, NAME).norm.default
    with open_vgpu(load("h200")) as gpu:
        x = torch.ones(3, device=gpu.device)
        for launch in (
            lambda: absent.norm(1, [x]),
            lambda: absent.kernels.norm[(1,)](out=x),
            lambda: op(x),
        ):
            with pytest.raises(HollowKernelError, match=f"{NAME} is not installed"):
                launch()
    assert hollow.refused == {f"{NAME}.norm", f"{NAME}.kernels.norm", f"torch.ops.{NAME}.norm.default"}
    assert f"{NAME}.norm would have launched a kernel and was refused" in hollow.notes()
    assert hollow.used == set()


def doubled_into(gpu: VirtualGpu, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Writes twice ``x`` into ``out`` and returns new memory."""
    out.copy_((x + x).contiguous())
    return x + torch.ones(x.shape, device=gpu.device)


def test_a_replaced_function_is_one_kernel(hollow: HollowPackages, absent: Any) -> None:
    sink = WindowRecorder()
    with open_vgpu(load("h200"), sink=sink) as gpu:
        hollow.replaced(f"{NAME}.double", lambda out, x: doubled_into(gpu, out, x))
        out, x = torch.zeros(3, device=gpu.device), torch.arange(3.0, device=gpu.device)
        result = absent.double(out, x)
        graph = torch.get_device_module(gpu.device).CUDAGraph()
        with torch.get_device_module(gpu.device).graph(graph):
            absent.double(out, x)
        x.add_(1)
        graph.replay()
        assert (out.tolist(), result.tolist()) == ([2, 4, 6], [1, 2, 3])
    assert [op for op in sink.names if "double" in op or "graph" in op] == [f"{NAME}.double", "graph[1]"]
    assert "ones" not in sink.names
    assert hollow.notes() == [
        f"{NAME} is not installed and was hollow",
        f"{NAME}.double was computed by a replacement",
    ]


def test_a_replacement_may_not_copy_to_the_host(hollow: HollowPackages, absent: Any) -> None:
    hollow.replaced(f"{NAME}.length", lambda x: x.sum().item())
    with open_vgpu(load("h200")) as gpu, pytest.raises(RuntimeError, match=f"{NAME}.length: the function"):
        absent.length(torch.ones(3, device=gpu.device))


def test_accesses_of_a_replaced_function_are_exact(hollow: HollowPackages, absent: Any) -> None:
    """A race on the row that the kernel reads is found, and one on another row is not. Memory that only the computation
    on the CPU uses gives no finding."""

    def findings(row: int) -> int:
        with open_vgpu(load("h200"), hazards=True) as gpu, cuda_answered(gpu, load("h200")):
            hollow.replaced(f"{NAME}.take", lambda table, rows: (table[rows] * 2).sum(0))
            table, rows = torch.ones(4, 8, device="cuda"), torch.tensor([1], device="cuda")
            side = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                table[row].fill_(3)
            absent.take(table, rows)
            return len(gpu.findings)

    assert (findings(row=1), findings(row=2)) == (1, 0)


def test_the_memory_of_a_replaced_functions_result_may_still_be_in_use(
    hollow: HollowPackages, absent: Any
) -> None:
    with open_vgpu(load("h200"), hazards=True) as gpu, cuda_answered(gpu, load("h200")):
        hollow.replaced(f"{NAME}.twice", lambda x: x + x)
        x, side = torch.ones(64, device="cuda"), torch.cuda.Stream()
        torch.cuda.synchronize()
        old = torch.ones(64, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _ = old + 1
        del old
        _ = absent.twice(x)
        assert [finding.kind for finding in gpu.findings] == ["freed"]
