"""The kernels on the device, through their ops, against torch's implementations in float64."""

from __future__ import annotations

import pytest
import torch

from schedbench.sched.kernels.linear import linear
from tests.sched.kernels.triton_cases.case import floats
from tests.sched.kernels.triton_parity import CASES, names, wrong

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("name", "dtype"), list(names()), ids=str)
def test_the_result_is_torchs(name: str, dtype: torch.dtype) -> None:
    assert wrong(name, dtype, CASES[name].op, "cuda") == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("widened", [False, True])
def test_products_are_the_librarys(dtype: torch.dtype, biased: bool, widened: bool) -> None:
    x, weight, bias = (part.to(dtype) for part in (floats(5, 64), floats(64, 48), floats(48)))
    out_dtype = torch.float32 if widened else dtype
    arguments = [part.cuda() if part is not None else None for part in (x, weight, bias if biased else None)]
    found = linear(*arguments, out_dtype).cpu()
    expected = x.double() @ weight.double() + (bias.double() if biased else 0)
    assert found.dtype == out_dtype
    torch.testing.assert_close(
        found, expected.to(out_dtype), rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps
    )
