"""Small host arrays to the device, by the copies a variant makes."""

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
        return [_send(torch.from_numpy(array), device) for array in arrays]
    return _send_packed(arrays, device)


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # A fresh pinned block per use: the host allocator does not re-issue it before the copy has run.
    return tensor.pin_memory().to(device, non_blocking=True)


def _send_packed(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device) -> list[torch.Tensor]:
    parts = [np.frombuffer(array.tobytes(), np.uint8) for array in arrays]
    padded = [np.pad(part, (0, -part.size % _ALIGNMENT)) for part in parts]
    packed = _send(torch.from_numpy(np.concatenate(padded)), device)
    starts = accumulate((part.size for part in padded), initial=0)
    return [
        packed[start : start + part.size].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, part, array in zip(starts, parts, arrays, strict=False)
    ]
