"""How often a decode found a token that it attends to in its request's hot buffer. The device counts; this reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class Lookups(NamedTuple):
    """Of requests longer than their buffers; the newest token, which is never looked for, does not count."""

    asked: int
    missed: int

    @property
    def hit_ratio(self) -> float | None:
        return 1 - self.missed / self.asked if self.asked else None


class Counted(Protocol):
    """Whoever has hot buffers."""

    lookups: torch.Tensor  # [2] int64: asked, missed, since the beginning


class LookupCount:
    """From its making on."""

    def __init__(self, buffers: Counted, peek: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._buffers = buffers
        self._peek = peek
        self._before = self._now()

    def found(self) -> Lookups:
        now = self._now()
        return Lookups(now.asked - self._before.asked, now.missed - self._before.missed)

    def _now(self) -> Lookups:
        return Lookups(*map(int, self._peek(self._buffers.lookups).tolist()))
