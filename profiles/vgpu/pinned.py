"""Pinned host memory: a property of a storage, shared by its views.

It is kept on the storage's Python object, which lives exactly as long as the storage: a recycled address is not
pinned by accident.
"""

from __future__ import annotations

import torch


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Declare the tensor's storage pinned; returns the tensor."""
    tensor.untyped_storage()._vgpu_pinned = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "_vgpu_pinned", False)
