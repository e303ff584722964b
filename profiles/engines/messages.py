"""What processes of one run send each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch


def end_copies_of(process: int) -> None:
    """End this process if it is not that one but a copy that an engine has forked: what the copy said or received would
    be lost to the rank."""
    if os.getpid() != process:
        os._exit(0)


class HostTensor(NamedTuple):
    """A tensor's bytes, None where it has no values."""

    body: bytes | None
    dtype: torch.dtype
    shape: Sequence[int]

    @classmethod
    def of(cls, value: torch.Tensor) -> HostTensor:
        flat = value.reshape(-1)
        body = None if value.is_meta else flat.view(torch.uint8).numpy().tobytes()
        return cls(body, value.dtype, tuple(value.shape))

    def value(self) -> torch.Tensor:
        if self.body is None:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return torch.frombuffer(bytearray(self.body), dtype=self.dtype).view(self.shape)
