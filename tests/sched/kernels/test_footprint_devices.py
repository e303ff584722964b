"""On a real device footprints are worked out from its own tensors: nothing of the host's may come between. What follows
from values is not computed by fake tensors, and not looked at here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from schedbench.sched.kernels.registry import kernels
from tests.sched.kernels.triton_parity import CASES


def on_cuda(arg: Any) -> Any:
    """Of a tensor its place on that device, which a fake tensor has without one."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="cuda")


@pytest.mark.parametrize("name", CASES)
def test_a_footprint_stays_on_its_device(name: str) -> None:
    chosen = CASES[name]
    arguments = list(chosen.arguments(torch.float32))
    with FakeTensorMode():
        try:
            kernels()[chosen.op].footprint(*tree_map(on_cuda, arguments))
        except RuntimeError as error:
            assert not re.search(r"two (different )?devices", str(error))
