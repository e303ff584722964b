"""CUDA's copy rules, row by row: the copies of an expression, and whether the host waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.vgpu.gpu import open_vgpu
from tests.profiles.vgpu.conftest import Bench

Copy = tuple[str, str, int, bool]  # kind, host memory, bytes, blocking
Names = Mapping[str, Any]

PAGEABLE_BIG = 65536 // 4 + 1

# Torch asks how many of the numbers are finite, compares each one with an integer, and all with three bounds of its
# formats, measures the text of each, reads the tensor, and asks for the format of each (_tensor_str.py).
PRINTED: list[Copy] = [
    ("d2h", "pinned", 4, True),
    *[("d2h", "pinned", 1, True)] * 9,
    *[("d2h", "pinned", 4, True)] * 6,
    ("d2h", "pageable", 24, True),
    *[("d2h", "pinned", 1, True)] * 6,
]
# expression, copies, whether the host waited for the device
TABLE: list[tuple[str, list[Copy], bool]] = [
    # one number to the host, openly or not
    ("x[0].item()", [("d2h", "pinned", 4, True)], True),
    ("int(ids[0])", [("d2h", "pinned", 8, True)], True),
    ("float(x[0])", [("d2h", "pinned", 4, True)], True),
    ("bool((x == x).all())", [("d2h", "pinned", 1, True)], True),
    ("x[ids[1]]", [("d2h", "pinned", 8, True)], True),
    ("x[: ids[1]]", [("d2h", "pinned", 8, True)], True),
    ("2 in ids", [("d2h", "pinned", 1, True)], True),
    ("torch.tensor([ids[0], ids[1]])", [("d2h", "pinned", 8, True)] * 2, True),
    # tensors to the host
    ("x.tolist()", [("d2h", "pageable", 24, True)], True),
    ("x.cpu()", [("d2h", "pageable", 24, True)], True),
    ("x.to('cpu')", [("d2h", "pageable", 24, True)], True),
    ("x.to('cpu', non_blocking=True)", [("d2h", "pinned", 24, False)], False),
    ("pinned.copy_(x, non_blocking=True)", [("d2h", "pinned", 24, False)], False),
    ("pinned.copy_(x)", [("d2h", "pinned", 24, True)], True),
    ("pinned[2:4].copy_(x[:2], non_blocking=True)", [("d2h", "pinned", 8, False)], False),
    ("host.copy_(x, non_blocking=True)", [("d2h", "pageable", 24, True)], True),
    ("host.copy_(x)", [("d2h", "pageable", 24, True)], True),
    ("str(x)", PRINTED, True),
    ("repr(x)", PRINTED, True),
    ("f'{x}'", PRINTED, True),
    ("f'{x[0]:.2f} {x[0]}'", [("d2h", "pinned", 4, True)] * 2, True),
    # tensors to the device
    ("host.to(device)", [("h2d", "pageable", 24, True)], True),
    ("x.copy_(host)", [("h2d", "pageable", 24, True)], True),
    ("host.to(device, non_blocking=True)", [("h2d", "pageable", 24, False)], False),
    ("big.to(device, non_blocking=True)", [("h2d", "pageable", 4 * PAGEABLE_BIG, True)], True),
    ("pinned.to(device, non_blocking=True)", [("h2d", "pinned", 24, False)], False),
    ("pinned.to(device)", [("h2d", "pinned", 24, True)], True),
    ("pinned[1:3].to(device, non_blocking=True)", [("h2d", "pinned", 8, False)], False),
    ("pinned[::2].to(device, non_blocking=True)", [("h2d", "pageable", 12, False)], False),
    ("pinned.view(2, 3).t().to(device, non_blocking=True)", [("h2d", "pinned", 24, False)], False),
    (
        "pinned.view(2, 3).t().copy_(x.view(2, 3).t(), non_blocking=True)",
        [("d2h", "pinned", 24, False)],
        False,
    ),
    ("host.pin_memory().to(device, non_blocking=True)", [("h2d", "pinned", 24, False)], False),
    (
        "torch.tensor([1, 2], pin_memory=True).to(device, non_blocking=True)",
        [("h2d", "pinned", 16, False)],
        False,
    ),
    ("torch.tensor([1, 2], device=device)", [("h2d", "pageable", 16, True)], True),
    ("torch.as_tensor([1, 2], device=device)", [("h2d", "pageable", 16, True)], True),
    ("x.new_tensor([1.0, 2.0])", [("h2d", "pageable", 8, True)], True),
    # converting copies: source bytes and the device converts, or destination bytes and the host does
    ("host.to(device, torch.float64, non_blocking=True)", [("h2d", "pageable", 24, False)], False),
    ("host.to(device, torch.float64)", [("h2d", "pageable", 48, True)], True),
    ("pinned.to(device, torch.float64, non_blocking=True)", [("h2d", "pinned", 24, False)], False),
    ("pinned.copy_(wide, non_blocking=True)", [("d2h", "pinned", 24, False)], False),
    ("pinned.copy_(wide)", [("d2h", "pageable", 48, True)], True),
    # writing numbers
    ("x.__setitem__(0, 1.0)", [("h2d", "pageable", 4, True)], True),
    ("x.__setitem__((slice(0, 2),), 1.0)", [], False),
    ("x.__setitem__(slice(0, 2), 1.0)", [], False),
    ("x.__setitem__(..., 1.0)", [], False),
    ("x.__setitem__(x > 0, 0.0)", [], False),
    ("table.__setitem__(table[:, 0] > 0, 0.0)", [], False),
    ("x.__setitem__(ids, 1.0)", [("h2d", "pageable", 4, True)], True),
    ("x.__setitem__(0, torch.tensor(1.0))", [("h2d", "pageable", 4, True)], True),
    ("x.__setitem__(slice(0, 2), x[2:4])", [], False),
    ("x.fill_(1.0)", [], False),
    ("x.zero_()", [], False),
    # masks and lists as indices
    ("x[x > 0]", [("d2h", "pinned", 4, True)], True),
    ("x.__setitem__(x > 0, x + 1)", [("d2h", "pinned", 4, True)], True),
    ("torch.where(x > 0)", [("d2h", "pinned", 4, True)], True),
    ("torch.where(x > 0, x, 0)", [], False),
    ("x.nonzero()", [("d2h", "pinned", 4, True)], True),
    ("torch.masked_select(x, x > 0)", [("d2h", "pinned", 4, True)], True),
    ("x[[0, 1]]", [("h2d", "pageable", 16, True)], True),
    ("x[torch.tensor([0, 1])]", [("h2d", "pageable", 16, True)], True),
    ("x[torch.tensor([True, False, True, False, False, True])]", [("h2d", "pageable", 24, True)], True),
    ("x.__setitem__(torch.tensor([0, 1]), x[2:4] + 1)", [("h2d", "pageable", 16, True)], True),
    ("x[ids]", [], False),
    ("x.index_select(0, ids)", [], False),
    # hidden counts
    ("ids.unique()", [("d2h", "pinned", 8, True)], True),
    ("torch.repeat_interleave(ids, ids)", [("d2h", "pinned", 8, True)], True),
    ("torch.repeat_interleave(ids, ids, output_size=3)", [], False),
    ("torch.bincount(ids)", [("d2h", "pinned", 8, True)] * 2, True),
    ("torch.equal(x, x)", [("d2h", "pinned", 1, True)], True),
    ("torch.multinomial(x, 1)", [("d2h", "pinned", 1, True)] * 2, True),
    ("torch.nn.functional.one_hot(ids)", [("d2h", "pinned", 8, True)], True),
    ("torch.argwhere(x)", [("d2h", "pinned", 4, True)], True),
    ("ids.unique_consecutive()", [("d2h", "pinned", 8, True)], True),
    ("torch.histc(x)", [("d2h", "pinned", 4, True)] * 2, True),
    ("torch.histc(x, bins=4, min=0, max=2)", [], False),
    ("torch.allclose(x, x)", [("d2h", "pinned", 1, True)], True),
    ("torch.linalg.inv(torch.eye(2, device=device))", [("d2h", "pinned", 1, True)], True),
    ("torch.linspace(x[0], x[1], 3, device=device)", [("d2h", "pinned", 4, True)] * 2, True),
    ("torch._assert_async(x[0])", [], False),
    ("torch.searchsorted(x, x, sorter=torch.arange(6, device=device))", [], False),
    # nothing to copy
    ("torch.arange(4, device=device)", [], False),
    ("torch.zeros(4, device=device)", [], False),
    ("torch.full((4,), 7, device=device)", [], False),
    ("torch.zeros_like(x)", [], False),
    ("x.new_full((3,), 2.0)", [], False),
    ("x.to(torch.int32)", [], False),
    ("torch.empty(0).to(device)", [], False),
]


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def names(bench: Any, request: pytest.FixtureRequest) -> Iterator[Names]:
    """Under inference_mode torch passes composite ops to the tensor's class undivided; the copies are the same."""
    device = bench.gpu.device
    with request.param():
        yield _names(device)


def _names(device: torch.device) -> Names:
    return {
        "torch": torch,
        "device": device,
        "x": torch.ones(6, device=device),
        "wide": torch.ones(6, dtype=torch.float64, device=device),
        "table": torch.ones(6, 2, device=device),
        "ids": torch.arange(3, device=device),
        "host": torch.ones(6),
        "big": torch.ones(PAGEABLE_BIG),
        "pinned": torch.ones(6, pin_memory=True),
    }


def test_copies_of_every_expression(bench: Any, names: Names) -> None:
    def seen(expression: str) -> tuple[str, list[Copy], bool]:
        own = _names(names["device"])
        recorder = bench.observe(lambda: eval(expression, own))
        copies = [
            (op.kind, op.host_memory, op.bytes, op.blocking)
            for op in recorder.ops
            if op.kind in ("h2d", "d2h")
        ]
        return expression, copies, any(call.waited for call in recorder.calls)

    assert [seen(expression) for expression, *_ in TABLE] == TABLE


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("x.__setitem__(0, 5.0) or x.tolist()", [5.0, 1, 1, 1, 1, 1]),
        ("repr(2 * table)[:36]", "tensor([[2., 2.],\n        [2., 2.],\n"),
        ("f'{x[0]:.2f} {x[0]}'", "1.00 1.0"),
        ("x.__setitem__(slice(1, 3), 5.0) or x.tolist()", [1, 5.0, 5.0, 1, 1, 1]),
        ("x.__setitem__(ids, 5.0) or x.tolist()", [5.0, 5.0, 5.0, 1, 1, 1]),
        ("table.__setitem__(table[:, 0] > 0, 0.0) or table.sum().item()", 0.0),
        ("x[torch.tensor([True, False, True, False, False, True])].tolist()", [1.0, 1.0, 1.0]),
        ("x[(ids < 2).repeat(2)].tolist()", [1.0] * 4),
        ("table[torch.ones(6, 2, dtype=torch.bool)].tolist()", [1.0] * 12),
        ("torch.tensor([ids[1], ids[2]], device=device).tolist()", [1, 2]),
        ("x.view(2, 3)[:, ids].tolist()", [[1.0] * 3] * 2),
        ("table.__setitem__((slice(None), ids[:1]), 3 * x[:1]) or table.sum().item()", 24.0),
        ("torch.max(table, 0, out=(table[0].clone(), ids[:2].clone()))[1].tolist()", [0, 0]),
        ("torch.eye(2, device=device).tolist()", [[1.0, 0.0], [0.0, 1.0]]),
        ("torch.linspace(0, 1, 3, device=device).tolist()", [0.0, 0.5, 1.0]),
        ("torch.arange(1, 7, 2, device=device).tolist()", [1, 3, 5]),
        ("torch.add(x, x, out=torch.empty_like(x)).tolist()", [2.0] * 6),
        ("x.view(2, 3).t().contiguous().shape", (3, 2)),
        ("[int(i) for i in ids]", [0, 1, 2]),
        ("(x + torch.tensor(2.0)).tolist()", [3.0] * 6),
        ("torch.ones_like(x, dtype=torch.int64, device='cpu').tolist()", [1] * 6),
    ],
)
def test_values_equal_torchs(names: Names, expression: str, expected: Any) -> None:
    assert eval(expression, dict(names)) == expected


def test_a_pageable_destination_waits_in_the_copy_and_a_pinned_one_in_the_sync(
    bench: Any, names: Names
) -> None:
    calls = bench.observe(lambda: names["x"].cpu()).calls
    assert [(c.name, c.waited > 0) for c in calls] == [
        ("cudaMemcpyAsync", True),
        ("cudaStreamSynchronize", False),
    ]
    calls = bench.observe(lambda: names["pinned"].copy_(names["x"])).calls
    assert [(c.name, c.waited > 0) for c in calls] == [
        ("cudaMemcpyAsync", False),
        ("cudaStreamSynchronize", True),
    ]


def test_a_large_pageable_source_waits_for_its_stream(bench_none: Bench) -> None:
    device = bench_none.gpu.device
    work = torch.ones(4096, 4096, device=device)

    def upload(source: torch.Tensor) -> int:
        torch.get_device_module("vgpu").synchronize()
        work @ work
        return bench_none.spent(lambda: source.to(device, non_blocking=True))

    assert upload(torch.ones(6)) < 20_000
    assert upload(torch.ones(PAGEABLE_BIG)) > 1_000_000


def test_device_copies_are_memcpys_when_alike_and_contiguous(bench: Any, names: Names) -> None:
    x, table = names["x"], names["table"]

    def kinds(body: Callable[[], Any]) -> list[tuple[str, int]]:
        return [(op.kind, op.bytes) for op in bench.observe(body).ops]

    assert kinds(lambda: x.clone()) == [("d2d", 24)]
    assert kinds(lambda: x[:3].copy_(x[3:])) == [("d2d", 12)]
    assert kinds(lambda: table.t().contiguous()) == [("kernel", 0)]
    assert kinds(lambda: x.to(torch.float64)) == [("kernel", 0)]
    assert kinds(lambda: table.t().clone()) == [("d2d", 48)]
    assert kinds(lambda: table.t()[:1].copy_(table.t()[1:])) == [("kernel", 0)]
    assert kinds(lambda: table.copy_(x[:2])) == [("kernel", 0)]
    assert kinds(lambda: x.copy_(x)) == kinds(lambda: x.__setitem__(slice(0, 3), x[:3])) == []
    assert kinds(lambda: x.zero_()) == kinds(lambda: table[:, 0].zero_()) == [("kernel", 0)]
    assert (
        kinds(lambda: torch.zeros(6, device=x.device))
        == kinds(lambda: torch.zeros_like(x))
        == [("kernel", 0)]
    )
    assert kinds(lambda: x.view(2, 3)[0]) == []
    assert kinds(lambda: torch.cat([x, x])) == [("kernel", 0)]
    assert kinds(lambda: torch.cat([x])) == [("d2d", 24)]
    assert kinds(lambda: torch.stack([x])) == [("d2d", 24)]
    assert kinds(lambda: torch.cat([table.t()])) == [("kernel", 0)]
    assert kinds(lambda: torch.cat([x, names["ids"]])) == [("d2d", 24), ("kernel", 0)]
    assert kinds(lambda: torch.cat([x[:0]])) == []
    assert len(kinds(lambda: torch.cat([x] * 128))) == len(kinds(lambda: torch.stack([x] * 128))) == 1
    assert len(kinds(lambda: torch.cat([x] * 257))) == 3
    assert len(kinds(lambda: torch.cat([x[:0]] * 128 + [x]))) == 1
    assert len(kinds(lambda: torch.cat([x] * 64 + [table.t()[0]]))) == 2
    assert kinds(lambda: x.masked_fill(x > 2, 0.0)) == [("kernel", 0), ("d2d", 24), ("kernel", 0)]
    assert kinds(lambda: x.index_put((names["ids"],), x[:3])) == [("d2d", 24), ("kernel", 0)]


@pytest.mark.parametrize(
    "expression",
    [
        "empty.add_(1)",
        "empty.fill_(1)",
        "empty.zero_()",
        "empty.sort()",
        "empty.copy_(empty)",
        "torch.zeros(0, device=device)",
        "torch.add(empty, 1, out=x[:0])",
        "x[none]",
        "x.__setitem__(none, x[:0])",
        "x.index_add_(0, none, empty)",
        "x.index_copy_(0, none, source=empty)",
        "x.scatter_(0, index=none, src=empty)",
    ],
)
def test_what_touches_no_element_launches_nothing(bench: Any, names: Names, expression: str) -> None:
    own = {**names, "empty": torch.empty(0, device=names["device"]), "none": names["ids"][:0]}
    assert bench.observe(lambda: eval(expression, own)).ops == []


@pytest.mark.parametrize(
    "expression",
    [
        "x + host",
        "torch.cat([x, host])",
        "host.add_(x)",
        "torch.tensor(1.0).add_(x[0])",
        "torch.add(x, x, out=host)",
        "x.index_put_((ids,), host[:3])",
        "torch.add(host, host, out=x)",
    ],
)
def test_mixing_host_and_device_raises(names: Names, expression: str) -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        eval(expression, dict(names))


def test_a_device_index_on_a_host_tensor_raises(names: Names) -> None:
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        names["host"][names["ids"]]


def test_host_access_to_a_device_tensor_is_refused(names: Names) -> None:
    x = names["x"]
    with pytest.raises(TypeError, match="can't convert vgpu:0 device type tensor to numpy"):
        x.numpy()
    with pytest.raises(AttributeError, match="has no resize_"):
        x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        torch.save(x, "/dev/null")
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        x.pin_memory()
    assert not x.is_pinned()


def test_pinned_memory_is_a_property_of_the_storage(names: Names) -> None:
    pinned, host = names["pinned"], names["host"]
    assert pinned.is_pinned() and pinned[1:].is_pinned() and pinned.view(2, 3).is_pinned()
    assert pinned.pin_memory() is pinned
    copy = host.pin_memory()
    assert copy.is_pinned() and torch.equal(copy, host) and not host.is_pinned()
    assert not torch.from_numpy(pinned.numpy()).is_pinned()
    assert torch.zeros_like(host, pin_memory=True).is_pinned()
    assert host.new_empty(3, pin_memory=True).is_pinned()


def test_reused_memory_is_not_pinned() -> None:
    with open_vgpu(load("h200")):
        for _ in range(100):
            assert torch.empty(1000, pin_memory=True).is_pinned()
            assert not torch.empty(1000).is_pinned()


def test_a_device_without_pinned_memory(opened: Any) -> None:
    with opened(hardware=load("mlx-like")) as bench:
        x = torch.ones(6, device=bench.gpu.device)
        with pytest.raises(RuntimeError, match="no pinned memory"):
            torch.ones(6).pin_memory()
        with pytest.raises(RuntimeError, match="no pinned memory"):
            torch.empty(6, pin_memory=True)
        recorder = bench.observe(lambda: x.to("cpu", non_blocking=True))
        assert [(op.host_memory, op.blocking) for op in recorder.ops] == [("pageable", True)]
        assert any(call.waited for call in recorder.calls)


def test_a_device_without_side_streams_and_events(opened: Any) -> None:
    with opened(hardware=load("mlx-like")):
        module = torch.get_device_module("vgpu")
        module.current_stream().synchronize()
        for make in (module.Stream, module.Event, module.CUDAGraph):
            with pytest.raises(RuntimeError, match=r"not available|no graphs"):
                make()
