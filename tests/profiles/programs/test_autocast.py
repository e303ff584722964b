"""``torch.autocast`` on the virtual GPU: CUDA's rules, with each cast counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.programs.autocast import rules
from schedbench.profiles.programs.torch_cuda import cuda_answered
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.profiles.vgpu.gpu import open_vgpu
from tests.profiles.recorders import WindowRecorder

HALF, FLOAT = torch.float16, torch.float32


sink = WindowRecorder()


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    sink.windows.clear()
    with open_vgpu(load("h200"), sink=sink, gradients=True) as gpu, cuda_answered(gpu, load("h200")):
        yield gpu


def casts(gpu: VirtualGpu, function: Callable[[], object]) -> int:
    """Returns how many casts the function launches."""
    gpu.flush()
    sink.windows.clear()
    function()
    gpu.flush()
    return sink.names.count("copy_")


def test_the_operators_are_those_of_cuda() -> None:
    """A build of torch without CUDA also has CUDA's rules of autocast."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    cuda = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, "AutocastCUDA")
    }
    ours = {name for name, _ in rules()}
    not_in_header = {"norm.names_ScalarOpt_dim", "linalg_matrix_sqrth"}  # torch 2.11; 2.14
    assert {name for name in cuda if "cudnn" not in name} - not_in_header == ours
    assert len(ours) > 90


@pytest.mark.parametrize(
    ("call", "dtype", "expected"),
    [
        ("x @ x", HALF, 2),
        ("h @ h", HALF, 0),
        ("F.linear(x, h, None)", HALF, 1),
        ("torch.einsum('ij,jk->ik', x, x)", HALF, 2),
        ("h.exp()", FLOAT, 1),
        ("x.exp()", FLOAT, 0),
        ("h.softmax(-1)", FLOAT, 1),  # CUDA casts inside the kernel
        ("h.bfloat16().softmax(-1)", FLOAT, None),
        ("h.softmax(-1, dtype=HALF)", HALF, 0),
        ("h.sum()", FLOAT, 0),
        ("h.cumsum(0)", FLOAT, 0),
        ("h.norm()", FLOAT, 0),
        ("h.norm(dim=0)", FLOAT, 0),
        ("torch.addcmul(x, h, h)", FLOAT, 2),
        ("torch.addcmul(h, h, h)", HALF, 0),
        ("x + h", FLOAT, None),  # by the promotion of every add
        ("x.double() @ x.double()", torch.float64, None),
        ("x.long().sum()", torch.int64, None),
    ],
)
def test_an_operator_casts_by_its_rule(
    gpu: VirtualGpu,
    call: str,
    dtype: torch.dtype,
    expected: int | None,
) -> None:
    """Calls the operator with x of float32 and h of float16."""
    x, found = torch.ones(4, 4, device="cuda"), list[torch.Tensor]()
    given = {"x": x, "h": x.half(), "torch": torch, "F": F, "HALF": HALF}
    with torch.autocast("cuda"):
        count = casts(gpu, lambda: found.append(eval(call, given)))
    assert found[0].dtype == dtype
    assert expected is None or count == expected


def test_a_parameter_is_cast_once(gpu: VirtualGpu) -> None:
    layer, x = nn.Linear(4, 4, bias=False).cuda(), torch.ones(2, 4, device="cuda", dtype=HALF)

    def twice(**options: bool) -> None:
        with torch.autocast("cuda", **options):
            layer(x)
            with torch.autocast("cuda", **options):
                layer(x)

    assert [casts(gpu, twice), casts(gpu, twice), casts(gpu, lambda: twice(cache_enabled=False))] == [1, 1, 2]


@pytest.mark.usefixtures("gpu")
def test_training_with_a_gradient_scaler() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda")
    x, y, losses = torch.randn(8, 8, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda"), []
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
            loss = F.cross_entropy(out, y)
        assert (out.dtype, loss.dtype) == (torch.bfloat16, FLOAT)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3


@pytest.mark.usefixtures("gpu")
def test_torch_reports_the_state_of_autocast() -> None:
    x = torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16 == (x @ x).dtype
        with torch.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled("cuda") and (x @ x).dtype == FLOAT
    assert not torch.is_autocast_enabled("cuda") and (x @ x).dtype == FLOAT
    with torch.autocast("cpu"):
        assert (x @ x).dtype == FLOAT
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe under autocast"):
        F.binary_cross_entropy(x.sigmoid(), x)
