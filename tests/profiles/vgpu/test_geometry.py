"""Ops that change a tensor's geometry in place, and assignments to ``data``: the reported shape is that of the
contents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.profiles.vgpu.conftest import Bench, Opener

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
    opened: Opener, change: Callable[[torch.Tensor], object], like: torch.Tensor, operations: list[str]
) -> None:
    with opened(hazards=True) as bench:
        x = ROWS.to(bench.gpu.device)
        torch.get_device_module(bench.gpu.device).synchronize()
        assert bench.observe(lambda: change(x)).kinds == operations
        assert x.shape == x.cpu().shape == like.shape
        assert torch.equal(x.cpu(), like)


def test_new_values_of_a_parameter_are_used(opened: Opener) -> None:
    with opened(gradients=True) as bench:
        weight = torch.nn.Parameter(torch.ones(2, device=bench.gpu.device))
        weight.data = torch.full((2,), 3.0, device=bench.gpu.device)
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
    bench: Bench, change: Callable[[torch.Tensor], object]
) -> None:
    """What reads and writes few integers keeps NumPy's array of them with the tensor, see sched/kernels/arrays.py."""
    x, places = (torch.tensor(values, device=bench.gpu.device) for values in ([0, 1, 2, 3], [1, 2]))
    x[places] = places
    assert x[places].tolist() == [1, 2]
    change(x)
    assert x[places].tolist() == [6, 7]
    x[places] = places
    assert x[:4].tolist() == [5, 1, 2, 8]


def test_an_empty_tensor_can_be_filled(bench: Bench) -> None:
    device = bench.gpu.device
    assert torch.arange(4, out=torch.empty(0, device=device)).shape == (4,)
    assert torch.hann_window(4, device=device).tolist() == torch.hann_window(4).tolist()
    assert torch.logspace(0, 1, 3, device=device).tolist() == torch.logspace(0, 1, 3).tolist()


def test_tensors_without_values_have_sizes_and_addresses(bench_none: Bench) -> None:
    x, other = (torch.ones(4, 8, device=bench_none.gpu.device) for _ in range(2))
    assert x.untyped_storage().nbytes() == 128
    assert x[1].data_ptr() - x.untyped_storage().data_ptr() == 32
    assert abs(x.data_ptr() - other.data_ptr()) >= 128


def test_an_op_on_a_list_writes_all_tensors(bench: Bench) -> None:
    tensors = [torch.ones(2, device=bench.gpu.device), torch.zeros(3, device=bench.gpu.device)]
    assert bench.observe(lambda: torch._foreach_add_(tensors, 1)).kinds == ["kernel"]
    assert [tensor.tolist() for tensor in tensors] == [[2, 2], [1, 1, 1]]
    assert not bench.observe(lambda: torch._foreach_add_([tensors[0][:0]], 1)).kinds


def test_a_copy_of_lists_is_one_kernel_where_cuda_has_one(bench: Bench) -> None:
    """One list has one type, and each pair one layout, all on the device; otherwise each pair is a copy of its own."""
    types = (torch.int32, torch.int32, torch.int64)
    a, b, long = (torch.zeros(2, 2, device=bench.gpu.device, dtype=dtype) for dtype in types)
    for sources, kinds in (
        ([torch.ones_like(b), long + 1], ["d2d", "kernel"]),
        ([long + 1, long + 1], ["kernel"]),
        ([torch.ones_like(b).t(), b.clone()], ["kernel", "d2d"]),
        ([torch.ones(2, 2, dtype=torch.int32), b.clone()], ["h2d", "d2d"]),
    ):
        assert bench.observe(partial(torch._foreach_copy_, [a, b], sources)).kinds == kinds
    assert a.tolist() == [[1, 1], [1, 1]]
