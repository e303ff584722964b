"""Lookups of attended tokens in the hot buffers of requests. The device counts them; this module reads the counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class Lookups(NamedTuple):
    """Lookups of requests longer than their buffers. The newest token is never looked up and does not count."""

    total: int
    missed: int

    @property
    def hit_ratio(self) -> float | None:
        return 1 - self.missed / self.total if self.total else None


class HotBufferTables(Protocol):
    """Counts lookups on the device."""

    lookups: torch.Tensor  # [2] int64: total and missed, since the start


class LookupCount:
    """The lookups since the object was created. ``peek`` reads a tensor without the device noticing."""

    def __init__(self, buffers: HotBufferTables, peek: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._buffers = buffers
        self._peek = peek
        self._before = self._now()

    def found(self) -> Lookups:
        now = self._now()
        return Lookups(now.total - self._before.total, now.missed - self._before.missed)

    def _now(self) -> Lookups:
        return Lookups(*map(int, self._peek(self._buffers.lookups).tolist()))
