"""Names of streams. Torch identifies a stream by its CUDA handle, CUPTI by a number of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..record.timeline import Site
from ..vgpu.sites import Sites

DEFAULT = "default"
_UNNAMED = 1000  # first number of the streams that are known from CUPTI only


class StreamTable:
    """The small number and the name of each stream, as records have them. The last name given to a stream counts."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._by_handle: dict[int, int] = {}
        self._by_cupti: dict[int, int] = {}
        self.announce(DEFAULT, 0)

    def announce(self, name: str, handle: int) -> None:
        """Name the stream of this CUDA handle."""
        self.names[self.by_handle(handle)] = name

    def by_handle(self, handle: int) -> int:
        return self._by_handle.setdefault(handle, len(self._by_handle))

    def handles(self) -> list[int]:
        """The handles of all named streams; the default stream's is 0."""
        return [handle for handle, number in self._by_handle.items() if number in self.names]

    def identify(self, cupti: int, handle: int) -> None:
        """Set CUPTI's number of the stream of this handle."""
        self._by_cupti[cupti] = self.by_handle(handle)

    def by_cupti(self, cupti: int) -> int:
        """A stream that was never named gets its name from CUPTI's number."""
        number = self._by_cupti.setdefault(cupti, _UNNAMED + cupti)
        self.names.setdefault(number, f"stream {cupti}")
        return number


@dataclass(frozen=True, slots=True)
class WatchedNames:
    """The names behind the small integers of a CUDA run's records."""

    lines: Sites
    table: StreamTable

    @property
    def sites(self) -> Sequence[Site]:
        return self.lines.resolved()

    @property
    def streams(self) -> dict[int, str]:
        return self.table.names
