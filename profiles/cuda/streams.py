"""Streams under their names: torch knows them by handle, CUPTI by numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..record.timeline import Site
from ..vgpu.sites import Sites

DEFAULT = "default"
_UNNAMED = 1000  # numbers of streams that only CUPTI knows start here


class StreamTable:
    """Small numbers, as records carry them. The last name given to a stream stays."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._by_handle: dict[int, int] = {}
        self._by_cupti: dict[int, int] = {}
        self.announce(DEFAULT, 0)

    def announce(self, name: str, handle: int) -> None:
        """The stream of this CUDA handle is known as ``name``."""
        self.names[self.by_handle(handle)] = name

    def by_handle(self, handle: int) -> int:
        return self._by_handle.setdefault(handle, len(self._by_handle))

    def handles(self) -> list[int]:
        """Of every stream with a name, the default stream's 0 included."""
        return [handle for handle, number in self._by_handle.items() if number in self.names]

    def identify(self, cupti: int, handle: int) -> None:
        """CUPTI's number for the stream of this handle, found by experiment."""
        self._by_cupti[cupti] = self.by_handle(handle)

    def by_cupti(self, cupti: int) -> int:
        """A stream that nobody announced is named by CUPTI's number."""
        number = self._by_cupti.setdefault(cupti, _UNNAMED + cupti)
        self.names.setdefault(number, f"stream {cupti}")
        return number


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
