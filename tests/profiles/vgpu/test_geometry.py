"""Ops that change a tensor's geometry in place, and assignments to ``data``: the reported shape is that of the
contents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.vgpu.gpu import open_vgpu
from tests.profiles.recorders import WindowRecorder


def kinds(change: Callable[[torch.Tensor], object], shape: tuple[int, ...], like: torch.Tensor) -> list[str]:
    """Returns the device's operations for a change of a tensor [2, 3], which then has that shape and equals
    ``like``."""
    sink = WindowRecorder()
    with open_vgpu(load("h200"), sink=sink, hazards=True) as gpu:
        x = torch.arange(6.0).view(2, 3).to(gpu.device)
        torch.get_device_module(gpu.device).synchronize()
        gpu.flush()
        sink.windows.clear()
        change(x)
        gpu.flush()
        made = sink.kinds
        assert (x.shape, x.cpu().shape) == (shape, shape)
        assert torch.equal(x.cpu(), like)
    return made


ROWS = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("change", "like", "operations"),
    [
        (lambda x: x.t_(), ROWS.t(), []),
        (lambda x: x.unsqueeze_(0), ROWS[None], []),
        (lambda x: x.squeeze_(), ROWS, []),
        (lambda x: x.resize_(3, 2), ROWS.view(3, 2), []),
        (lambda x: x.resize_(2, 2), ROWS.view(6)[:4].view(2, 2), []),
        (lambda x: x.resize_(3, 3).resize_(2, 3), ROWS, ["d2d"]),  # the storage grows
        (lambda x: torch.add(x.new_ones(1, 1), 0, out=x), torch.ones(1, 1), ["kernel", "kernel"]),
        (lambda x: x.set_(x + 1), ROWS + 1, ["kernel"]),
        (lambda x: setattr(x, "data", x[0] + 1), ROWS[0] + 1, ["kernel"]),
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_change_in_place_makes_the_expected_operations(
    change: Callable[[torch.Tensor], object], like: torch.Tensor, operations: list[str]
) -> None:
    assert kinds(change, tuple(like.shape), like) == operations


def test_new_values_of_a_parameter_are_used() -> None:
    with open_vgpu(load("h200"), gradients=True) as gpu:
        weight = torch.nn.Parameter(torch.ones(2, device=gpu.device))
        weight.data = torch.full((2,), 3.0, device=gpu.device)
        assert (weight * 2).tolist() == [6, 6]
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            weight.data = torch.ones(2)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.set_(x + 5),
        lambda x: setattr(x, "data", x + 5),
        lambda x: x.resize_(6).copy_(torch.arange(5, 11, device=x.device)),
    ],
    ids=["set_", "data", "resize_"],
)
def test_elements_are_those_of_the_memory_that_a_tensor_has_now(
    change: Callable[[torch.Tensor], object],
) -> None:
    """What reads and writes few integers keeps NumPy's array of them with the tensor, see sched/kernels/arrays.py."""
    with open_vgpu(load("h200")) as gpu:
        x, places = (torch.tensor(values, device=gpu.device) for values in ([0, 1, 2, 3], [1, 2]))
        x[places] = places
        assert x[places].tolist() == [1, 2]
        change(x)
        assert x[places].tolist() == [6, 7]
        x[places] = places
        assert x[:4].tolist() == [5, 1, 2, 8]


def test_an_empty_tensor_can_be_filled() -> None:
    with open_vgpu(load("h200")) as gpu:
        empty = torch.empty(0, device=gpu.device)
        assert torch.arange(4, out=empty).shape == (4,)
        assert torch.hann_window(4, device=gpu.device).tolist() == torch.hann_window(4).tolist()
        assert torch.logspace(0, 1, 3, device=gpu.device).tolist() == torch.logspace(0, 1, 3).tolist()


def test_tensors_without_values_have_sizes_and_addresses() -> None:
    with open_vgpu(load("h200"), values="none") as gpu:
        x, other = torch.ones(4, 8, device=gpu.device), torch.ones(4, 8, device=gpu.device)
        assert x.untyped_storage().nbytes() == 128
        assert x[1].data_ptr() - x.untyped_storage().data_ptr() == 32
        assert abs(x.data_ptr() - other.data_ptr()) >= 128


def test_an_op_on_a_list_writes_all_tensors() -> None:
    sink = WindowRecorder()
    with open_vgpu(load("h200"), sink=sink) as gpu:
        tensors = [torch.ones(2, device=gpu.device), torch.zeros(3, device=gpu.device)]
        gpu.flush()
        sink.windows.clear()
        torch._foreach_add_(tensors, 1)
        gpu.flush()
        assert sink.kinds == ["kernel"]
        assert [tensor.tolist() for tensor in tensors] == [[2, 2], [1, 1, 1]]


def test_a_copy_of_lists_is_one_kernel_where_cuda_has_one() -> None:
    """One list has one type, and each pair one layout, all on the device; otherwise each pair is a copy of its own."""
    sink = WindowRecorder()
    with open_vgpu(load("h200"), sink=sink) as gpu:
        a, b, long = (
            torch.zeros(2, 2, device=gpu.device, dtype=t) for t in (torch.int32, torch.int32, torch.int64)
        )
        for targets, sources, kinds in (
            ([a, b], [torch.ones_like(b), long + 1], ["d2d", "kernel"]),
            ([a, b], [long + 1, long + 1], ["kernel"]),
            ([a, b], [torch.ones_like(b).t(), b], ["kernel", "d2d"]),
            ([a, b], [torch.ones(2, 2, dtype=torch.int32), b], ["h2d", "d2d"]),
        ):
            gpu.flush()
            sink.windows.clear()
            torch._foreach_copy_(targets, sources)
            gpu.flush()
            assert sink.kinds == kinds
        assert a.tolist() == [[1, 1], [1, 1]]
