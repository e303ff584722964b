"""The kernels on the device, through their ops, compared with torch's implementations in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedbench.sched.kernels.attention import attention
from schedbench.sched.kernels.dense import linear
from schedbench.sched.kernels.sparse import select_top_k
from tests.sched.kernels.triton_cases.case import floats
from tests.sched.kernels.triton_parity import CASES, names, wrong

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("name", "dtype"), list(names()), ids=str)
def test_the_result_equals_that_of_torch(name: str, dtype: torch.dtype) -> None:
    assert wrong(name, dtype, CASES[name].op, "cuda") == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("widened", [False, True])
def test_products_equal_those_of_the_library(dtype: torch.dtype, biased: bool, widened: bool) -> None:
    x, weight, bias = (part.to(dtype) for part in (floats(5, 64), floats(64, 48), floats(48)))
    out_dtype = torch.float32 if widened else dtype
    arguments = [part.cuda() if part is not None else None for part in (x, weight, bias if biased else None)]
    found = linear(*arguments, out_dtype).cpu()
    expected = x.double() @ weight.double() + (bias.double() if biased else 0)
    assert found.dtype == out_dtype
    # One after the other, 64 float32 of about 1 add up to no more than that much beside the sum.
    summed = 64 * torch.finfo(torch.float32).eps
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected.to(out_dtype), rtol=4 * eps, atol=max(8 * eps, summed))


def paged(context: int) -> list[torch.Tensor]:
    """A table whose entries after the first 40 are no slots, two rows of it, and lengths of 1."""
    table = torch.full((3, context), 1 << 30, dtype=torch.int32)
    table[:, :40] = torch.arange(120).view(3, 40)
    return [part.cuda() for part in (table, torch.tensor([1, 2]), torch.ones(2, dtype=torch.int64))]


def decode_of(lens: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> list[Any]:
    caches = [floats(120, 2, 16, seed=place).to(lens.device) for place in range(2)]
    return [floats(2, 4, 16).to(lens.device), *caches, table, rows, lens, None, 0.25, table.shape[1], 1]


def choice_of(lens: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> list[Any]:
    cache, q = floats(120, 16).to(lens.device), floats(2, 3, 16).to(lens.device)
    return [q, floats(2, 3).to(lens.device), cache, table, rows, lens, 4, table.shape[1]]


@pytest.mark.parametrize(("op", "arguments"), [(attention, decode_of), (select_top_k, choice_of)])
def test_a_graph_reads_only_up_to_the_lengths_on_the_device(op: Any, arguments: Any) -> None:
    """It is captured for a large context with lengths of 1: one more step would read outside of the table."""
    table, rows, lens = paged(1 << 17)
    given = arguments(lens, table, rows)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = op(*given)
    torch.cuda.synchronize()
    for now in ([1, 40], [33, 7]):
        lens.copy_(torch.tensor(now))
        graph.replay()
        torch.cuda.synchronize()
        short = arguments(torch.tensor(now), table[:, :40].cpu(), rows.cpu())
        torch.testing.assert_close(found.cpu(), op(*short), rtol=1e-4, atol=1e-5)
