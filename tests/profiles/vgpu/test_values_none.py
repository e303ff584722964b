"""Values none: shapes without floats, and integers with their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedbench.sched.kernels.declare import Work, Written, kernel, meta_like

EXPRESSIONS = [
    "f + 1",
    "f @ f.t()",
    "f[:, 1:]",
    "f[ids]",
    "f.index_select(0, ids)",
    "f.view(-1, 2)",
    "f.t().contiguous()",
    "f.sum(0)",
    "f.sum(-1, keepdim=True)",
    "torch.cat([f, f], 1)",
    "torch.stack([f, f])",
    "f.max(1).values",
    "f.argmax(-1)",
    "f.sort(-1).indices",
    "f > 0",
    "f.to(torch.bfloat16)",
    "f.to(torch.int64)",
    "ids.to(torch.float32)",
    "ids / 2",
    "torch.where(f > 0, f, 0)",
    "torch.zeros_like(f)",
    "torch.ones(3, device=f.device)",
    "f.clone()",
    "torch.softmax(f, -1)",
    "f[mask]",
    "f[ids, ids]",
    "f.unsqueeze(0).expand(2, -1, -1)",
    "list(f.unbind(0))[0]",
]


def _names(device: torch.device) -> dict[str, Any]:
    return {
        "torch": torch,
        "f": torch.arange(12, dtype=torch.float32).view(3, 4).to(device),
        "ids": torch.tensor([0, 2]).to(device),
        "mask": torch.tensor([True, False, True]).to(device),
    }


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_shapes_strides_and_types_equal_torchs(bench_none: Any, expression: str) -> None:
    actual = eval(expression, _names(bench_none.gpu.device))
    expected = eval(expression, _names(torch.device("cpu")))
    seen = (actual.shape, actual.stride(), actual.dtype)
    assert seen == (expected.shape, expected.stride(), expected.dtype)
    assert actual.held.is_meta == expected.is_floating_point()


def test_shapes_are_computed_once(bench_none: Any) -> None:
    names = _names(bench_none.gpu.device)

    def all_expressions() -> list[str]:
        seen: list[str] = []
        specs = bench_none.gpu.executor._specs
        for expression in EXPRESSIONS:
            before = len(specs._known)
            eval(expression, names)
            seen += [expression] * (len(specs._known) > before)
        return seen

    assert all_expressions()
    assert not all_expressions()


def test_integers_and_booleans_are_computed(bench_none: Any) -> None:
    device = bench_none.gpu.device
    lens = torch.tensor([3, 5], device=device)
    pool = torch.zeros(2, 8, dtype=torch.int32, device=device)
    pool[torch.arange(2, device=device), lens] = (lens * 10).to(torch.int32)
    assert pool.cpu()[0, 3] == 30 and pool.cpu()[1, 5] == 50
    assert (lens > 3).tolist() == [False, True]
    assert torch.cat([lens, lens + 1]).cumsum(0).tolist() == [3, 8, 12, 18]
    assert torch.empty(4, dtype=torch.int64, device=device).tolist() == [0] * 4


def test_floats_read_by_the_host_are_zero(bench_none: Any) -> None:
    f = torch.full((3,), 7.0, device=bench_none.gpu.device)
    assert f.tolist() == [0.0, 0.0, 0.0] and f.sum().item() == 0.0
    pinned = torch.ones(3, pin_memory=True)
    pinned.copy_(f, non_blocking=True)
    assert pinned.tolist() == [0.0, 0.0, 0.0]


def test_a_shape_that_depends_on_floats_is_refused(bench_none: Any) -> None:
    f = torch.ones(3, device=bench_none.gpu.device)
    with pytest.raises(ValueError, match="depends on floats that were not computed"):
        f.nonzero()


def test_large_shapes_use_no_memory(bench_none: Any) -> None:
    weights = torch.empty(1 << 20, 1 << 20, dtype=torch.bfloat16, device=bench_none.gpu.device)
    x = torch.empty(16, 1 << 20, dtype=torch.bfloat16, device=bench_none.gpu.device)
    recorder = bench_none.observe(lambda: x @ weights)
    flops, size = 2 * 16 << 40, weights.nbytes
    assert recorder.ops[0].end - recorder.ops[0].start > max(flops / 7.8e14, size / 4.3e12) * 1e9


@kernel(
    meta=lambda x, ids: (meta_like(x), meta_like(ids)),
    cost=lambda x, ids: Work(bytes=2 * x.nbytes + ids.nbytes),
    footprint=lambda: (),
)
def none_test_mixed(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, ids + 1


@kernel(meta=lambda ids: meta_like(ids), cost=None, footprint=lambda: (), unread_floats=True)
def none_test_integer(ids: Written, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    ids.add_(1)
    return ids * 10


def test_custom_kernels_compute_integers_only(bench_none: Any) -> None:
    device = bench_none.gpu.device
    x, ids = torch.ones(3, device=device), torch.tensor([1, 2], device=device)
    doubled, skipped = none_test_mixed(x, ids)
    assert doubled.held.is_meta and skipped.tolist() == [0, 0]
    assert none_test_integer(ids, x).tolist() == [20, 30] and ids.tolist() == [2, 3]


def test_a_kernel_without_cost_leaves_no_trace(bench_none: Any) -> None:
    device, clock = bench_none.gpu.device, bench_none.gpu.clock
    x, ids = torch.ones(3, device=device), torch.tensor([1, 2], device=device)
    before = clock.now()
    recorder = bench_none.observe(lambda: none_test_integer(ids, x))
    assert not recorder.windows and clock.now() == before
