"""Names behind the small integers of a CUDA run's records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..record.timeline import Site
from ..vgpu.sites import Sites
from .streams import StreamTable


@dataclass(frozen=True, slots=True)
class WatchedNames:
    lines: Sites
    table: StreamTable

    @property
    def sites(self) -> Sequence[Site]:
        return self.lines.resolved()

    @property
    def streams(self) -> dict[int, str]:
        return self.table.names
