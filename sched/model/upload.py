"""Uploads of small host arrays, by the copies that each variant makes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch

# pageable: one blocking copy per array, as upstream's torch.tensor(list, device=...)
# pinned: one asynchronous copy per array from a fresh pinned buffer
# packed: one asynchronous copy from one fresh pinned buffer; the results are views of one device buffer
Upload = Literal["pageable", "pinned", "packed"]

_ALIGNMENT = 8


def upload(
    arrays: Sequence[np.ndarray[Any, Any]], *, device: torch.device, how: Upload
) -> list[torch.Tensor]:
    """The arrays as device tensors of the same shapes and dtypes, copied in order of the current stream."""
    if how == "pageable" or not arrays:
        return [torch.tensor(array, device=device) for array in arrays]
    if how == "pinned":
        return [_send(array, device) for array in arrays]
    return unpack(_send(pack(arrays), device), like=arrays)


def _send(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    # A new pinned block per use: the host allocator does not reuse it before the copy has run.
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def pack(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The concatenated bytes of the arrays, each aligned to eight bytes."""
    return np.frombuffer(
        b"".join(array.tobytes().ljust(_padded_size(array), b"\0") for array in arrays), np.uint8
    ).copy()


def unpack(buffer: torch.Tensor, *, like: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
    """Views of a packed buffer, with the shapes and dtypes of the arrays that were packed."""
    starts = accumulate(map(_padded_size, like), initial=0)
    return [
        buffer[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, like, strict=False)
    ]


def _padded_size(array: np.ndarray[Any, Any]) -> int:
    return array.nbytes + -array.nbytes % _ALIGNMENT
