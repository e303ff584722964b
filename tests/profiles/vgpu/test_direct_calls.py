"""Custom kernels on the virtual GPU, called without torch's dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from schedbench.profiles.platform.hardware import HardwareProfile
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.profiles.vgpu.gpu import open_vgpu
from schedbench.profiles.vgpu.host_time import measured
from schedbench.profiles.vgpu.tensor import DeviceTensor
from schedbench.sched.kernels.rows import decode_positions


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


class SeenOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def gpu(hardware: HardwareProfile) -> Iterator[VirtualGpu]:
    with open_vgpu(hardware) as gpu:
        yield gpu


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ops that reach ``__torch_dispatch__``."""
    ops: list[Any] = []
    dispatch = vars(DeviceTensor)["__torch_dispatch__"].__func__

    def recorded(cls: type, func: Any, *rest: Any) -> Any:
        ops.append(func)
        return dispatch(cls, func, *rest)

    monkeypatch.setattr(DeviceTensor, "__torch_dispatch__", classmethod(recorded))
    return ops


def test_torch_dispatches_a_kernels_first_call_only(gpu: VirtualGpu, dispatched: list[Any]) -> None:
    lens = torch.tensor([3, 1], device=gpu.device)
    found = [decode_positions(lens).tolist() for _ in range(3)]
    assert found == [[2, 0]] * 3
    assert dispatched.count(decode_positions) == 1
    decode_positions(seq_lens=lens)
    assert dispatched.count(decode_positions) == 2


@pytest.mark.parametrize("mode", [SeenFunctions, SeenOperators])
def test_modes_see_every_call(gpu: VirtualGpu, mode: type[SeenFunctions] | type[SeenOperators]) -> None:
    lens = torch.tensor([3, 1], device=gpu.device)
    decode_positions(lens)
    with mode() as seen:
        decode_positions(lens)
    assert decode_positions in seen.functions


def test_where_host_time_is_measured_torch_dispatches_every_call(
    gpu: VirtualGpu, dispatched: list[Any]
) -> None:
    lens = torch.tensor([3, 1], device=gpu.device)
    with measured(gpu):
        decode_positions(lens)
        decode_positions(lens)
    assert dispatched.count(decode_positions) == 2


def test_on_the_host_a_kernel_runs_as_ever(gpu: VirtualGpu) -> None:
    decode_positions(torch.tensor([3, 1], device=gpu.device))
    assert decode_positions(torch.tensor([3, 0])).tolist() == [2, 0]
