"""Calls on the virtual GPU that leave out torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from schedbench.profiles.platform.hardware import HardwareProfile
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.profiles.vgpu.direct import dispatched
from schedbench.profiles.vgpu.gpu import open_vgpu
from schedbench.profiles.vgpu.host_time import measured
from schedbench.profiles.vgpu.patching import attributes_set
from schedbench.profiles.vgpu.tensor import DeviceTensor
from schedbench.sched.kernels.rows import decode_positions
from tests.profiles.recorders import WindowRecorder


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
def dispatched_ops(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ops that reach ``__torch_dispatch__``."""
    ops: list[Any] = []
    dispatch = vars(DeviceTensor)["__torch_dispatch__"].__func__

    def recorded(cls: type, func: Any, *rest: Any) -> Any:
        ops.append(func)
        return dispatch(cls, func, *rest)

    monkeypatch.setattr(DeviceTensor, "__torch_dispatch__", classmethod(recorded))
    return ops


def test_torch_dispatches_a_kernels_first_call_only(gpu: VirtualGpu, dispatched_ops: list[Any]) -> None:
    lens = torch.tensor([3, 1], device=gpu.device)
    found = [decode_positions(lens).tolist() for _ in range(3)]
    assert found == [[2, 0]] * 3
    assert dispatched_ops.count(decode_positions) == 1
    decode_positions(seq_lens=lens)
    assert dispatched_ops.count(decode_positions) == 2


@pytest.mark.parametrize("mode", [SeenFunctions, SeenOperators])
def test_modes_see_every_call(gpu: VirtualGpu, mode: type[SeenFunctions] | type[SeenOperators]) -> None:
    lens = torch.tensor([3, 1], device=gpu.device)
    decode_positions(lens)
    with mode() as seen:
        decode_positions(lens)
    assert decode_positions in seen.functions


def test_where_host_time_is_measured_torch_dispatches_every_call(
    gpu: VirtualGpu, dispatched_ops: list[Any]
) -> None:
    lens = torch.tensor([3, 1], device=gpu.device)
    with measured(gpu):
        decode_positions(lens)
        decode_positions(lens)
    assert dispatched_ops.count(decode_positions) == 2


def test_on_the_host_a_kernel_runs_as_ever(gpu: VirtualGpu) -> None:
    decode_positions(torch.tensor([3, 1], device=gpu.device))
    assert decode_positions(torch.tensor([3, 0])).tolist() == [2, 0]


# Statements on x [3] int64, i [2] int64, j [1] int64 and y [3] int32 of the device.
STATEMENTS: Final = (
    "z = x + x",
    "z = x + 1",
    "z = x + 1.5",
    "z = x + y",
    "z = x + torch.tensor(2)",
    "z = x - y",
    "z = x * 2",
    "z = x.clone()",
    "z = x.clone(memory_format=torch.contiguous_format)",
    "z = x.to(torch.int32)",
    "z = x.to(torch.int64)",
    "z = x.to(torch.int32, copy=True)",
    "z = x.to('cpu')",
    "z = x.to(torch.device('cpu'), non_blocking=True)",
    "z = x.to('cpu', torch.int32)",
    "z = x.narrow(0, 1, 2)",
    "z = x.narrow(0, -2, 1)",
    "z = x.select(0, 1)",
    "z = x.select(0, -1)",
    "z = torch.cat([x, i])",
    "z = torch.cat((i,))",
    "z = torch.cat([x, y])",
    "z = torch.cat([x, i], dim=-1)",
    "z = torch.cat([torch.ones(2), torch.ones(1)])",
    "z = x.copy_(y)",
    "z = x.copy_(torch.ones(3))",
    "x[i] = i + 4",
    "x[j] = j + 4",
    "x[i,] = i",
    "x[x > 1] = 7",
    "x[:2] = i",
    "x[:] = x + 1",
    "x[-1:] = j",
    "x[-1:] = y[:1]",
    "x[1:5] = j",
    "x[::2] = i",
    "x[2:0] = i[:0]",
    "x[j[0]:] = i",
)


@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("hazards", [False, True])
def test_a_call_with_a_shortcut_is_the_call_that_torch_dispatches(
    hardware: HardwareProfile, statement: str, *, hazards: bool
) -> None:
    assert _recorded(hardware, statement, [], hazards=hazards) == _recorded(
        hardware, statement, dispatched(), hazards=hazards
    )


def _recorded(hardware: HardwareProfile, statement: str, changes: Iterable[Any], *, hazards: bool) -> Any:
    """The result of the statement, the values of x after it, and all records of the device."""
    kept = WindowRecorder()
    with open_vgpu(hardware, sink=kept, hazards=hazards, watch=[]) as gpu, attributes_set(changes):
        x, y = torch.tensor([5, 1, 2]).to(gpu.device), torch.ones(3, dtype=torch.int32).to(gpu.device)
        known: dict[str, Any] = {"x": x, "y": y, "i": x[1:].clone(), "j": x[1:2].clone(), "torch": torch}
        exec(statement, known)
        found = known.get("z", x)
        result = found.device, found.dtype, found.tolist(), found is x
        values = x.tolist()
    return result, values, kept.windows


def test_most_shortcuts_do_not_reach_torchs_dispatcher(gpu: VirtualGpu, dispatched_ops: list[Any]) -> None:
    x = torch.tensor([1, 0]).to(gpu.device)
    dispatched_ops.clear()
    x[x.clone()] = x * 2 - (x + 1)
    assert x.to("cpu").tolist() == [-1, 0]
    assert dispatched_ops == []


def test_a_part_beyond_the_end_is_refused(gpu: VirtualGpu) -> None:
    x = torch.tensor([1, 0]).to(gpu.device)
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        x.narrow(0, 1, 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_indices_select_as_on_the_host(gpu: VirtualGpu, dtype: torch.dtype) -> None:
    host, lines, columns = torch.arange(12).to(dtype).view(3, 4), torch.tensor([2, -1]), torch.tensor([0, 3])
    table, rows = host.to(gpu.device), lines.to(gpu.device)
    assert table.view(-1)[rows].tolist() == host.view(-1)[lines].tolist()
    table[rows, columns.to(gpu.device)] = rows.to(dtype)
    host[lines, columns] = lines.to(dtype)
    assert table.tolist() == host.tolist()
    with pytest.raises(IndexError):
        table[rows + 3] = 0 * table[:2]


@pytest.mark.parametrize(
    "change",
    [
        lambda x, at: x[at(7)],
        lambda x, at: x.index_put_((at(7),), at(1)),
        lambda x, at: x.index_put_((at(0, 1),), at(1, 2, 3)),
        lambda x, at: x.index_put_((at(0, 1),), at(1, 2).unsqueeze(0).unsqueeze(0)),
    ],
    ids=["read behind the end", "write behind the end", "too many values", "too many dimensions"],
)
def test_wrong_indices_have_the_errors_of_torch(gpu: VirtualGpu, change: Callable[..., torch.Tensor]) -> None:
    said = []
    for device in ("cpu", gpu.device):
        x = torch.arange(6, device=device)
        with pytest.raises((IndexError, RuntimeError)) as error:
            change(x, lambda *values, where=device: torch.tensor(values, device=where))
        said.append((error.type, str(error.value)))
    assert said[0] == said[1]
