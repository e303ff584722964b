"""The Triton kernels compute what the torch implementations compute: in Triton's interpreter, at tiny shapes."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch

from schedbench.sched.kernels.declare import kernels, on_cuda, triton_kernel
from tests.json_programs import output_of
from tests.sched.kernels.triton_parity import CASES, names

TRITON = {entry.name: entry for entry in kernels().values() if triton_kernel(entry)}


@pytest.fixture(scope="session")
def found() -> dict[str, str]:
    """What is wrong with each case. The variable must be set before the kernels are defined."""
    answer: dict[str, str] = output_of("sched.kernels.triton_parity", TRITON_INTERPRET="1")
    return answer


@pytest.mark.wide
@pytest.mark.parametrize("name", [f"{name} {dtype}" for name, dtype in names(every=False)])
def test_the_result_equals_that_of_torch(found: dict[str, str], name: str) -> None:
    assert found[name] == ""


@pytest.mark.wide
def test_every_kernel_compiles_for_a_real_gpu_once_for_all_batch_sizes(tmp_path: Path) -> None:
    found = output_of("sched.kernels.triton_compiled", TRITON_CACHE_DIR=str(tmp_path))
    assert found == {"failures": {}, "compiled again": {}}


def test_every_triton_kernel_has_a_case() -> None:
    assert {entry.name for entry in TRITON.values()} == {
        kernels()[chosen.op].name for chosen in CASES.values()
    }


def test_launch_functions_take_arguments_of_their_ops() -> None:
    for name, entry in TRITON.items():
        launch = getattr(import_module(f"schedbench.sched.kernels.triton.{entry.module}"), name)
        assert signature(launch).parameters.keys() <= {*entry.signature.types, *entry.signature.groups}, name


def test_float64_uses_torch_on_cuda() -> None:
    seen = []
    on_cuda(replace(TRITON["rms_norm"], impl=seen.append))(torch.ones(1, dtype=torch.float64))
    assert len(seen) == 1


def test_cuda_without_triton_uses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedbench.sched.kernels.declare.find_spec", lambda _: None)
    assert on_cuda(replace(TRITON["rms_norm"], impl=lambda x: x + 1))(torch.ones(1)) == 2
