"""On a real device a footprint is computed from device tensors alone. Footprints that depend on values cannot be
computed with fake tensors and are not examined here."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from schedbench.sched.kernels.declare import kernels
from tests.sched.kernels.triton_parity import CASES


def on_cuda(arg: Any) -> Any:
    """Returns a fake tensor of the same layout on the CUDA device; other arguments stay as they are."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="cuda")


def test_footprints_mix_no_devices() -> None:
    for name, chosen in CASES.items():
        arguments = list(chosen.arguments(torch.float32))
        with FakeTensorMode():
            try:
                kernels()[chosen.op].footprint(*tree_map(on_cuda, arguments))
            except RuntimeError as error:
                assert not re.search(r"two (different )?devices", str(error)), name
