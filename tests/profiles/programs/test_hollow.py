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
from schedbench.profiles.vgpu.gpu import open_vgpu

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
