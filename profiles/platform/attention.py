"""Which library attends, where it is not our own kernels."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Final

import torch

from ...scenarios.schema import Scenario
from ...sched.model.config import ModelConfig
from ...sched.model.planned import FlashInfer, PlannedAttention
from .machine import MachineError

LIBRARY: Final = "flashinfer"
_DTYPES: Final = (torch.float16, torch.bfloat16)


def obstacle(scenario: Scenario, *, cuda: bool) -> str:
    """Why the scenario's attention cannot be had; empty if it can."""
    if scenario.engine.attention == "auto":
        return ""
    if not cuda:
        return f"engine.attention: {LIBRARY} has kernels for CUDA only"
    if find_spec(LIBRARY) is None:
        return f"engine.attention: {LIBRARY} is not installed: pip install 'schedbench[{LIBRARY}]'"
    return ""


def planned(scenario: Scenario, model: ModelConfig, req_to_token: torch.Tensor) -> PlannedAttention | None:
    """None for our own kernels. Raises MachineError."""
    if scenario.engine.attention == "auto":
        return None
    if model.dtype not in _DTYPES:
        raise MachineError(
            f"engine.attention: {LIBRARY} computes in float16 and bfloat16, the model is {model.dtype}"
        )
    return FlashInfer(model, req_to_token, library=import_module(LIBRARY))
