"""The Triton kernels on the device, through their ops, against torch's implementations in float64."""

from __future__ import annotations

import pytest
import torch

from tests.sched.kernels.triton_cases import CASES, names, wrong

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("name", "dtype"), list(names()), ids=str)
def test_the_result_is_torchs(name: str, dtype: torch.dtype) -> None:
    assert wrong(name, dtype, CASES[name].op, "cuda") == ""
