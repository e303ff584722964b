"""Pinned host memory: a property of a storage, shared by its views.

The property is an attribute of the storage's Python object, which exists exactly as long as the storage, so that an
address that is used again is not pinned by accident.
"""

from __future__ import annotations

import torch


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Declare the tensor's storage pinned; returns the tensor."""
    tensor.untyped_storage()._vgpu_pinned = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "_vgpu_pinned", False)
