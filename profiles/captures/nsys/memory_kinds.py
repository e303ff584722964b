"""The numbers of copies in an export: their direction, and the kinds of memory at both ends.

Nsight Systems has other numbers for kinds of memory than CUPTI. They are taken from the export's enumerations; in an
export without these, the device's end of its copies shows which numbers it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .tables import Tables

UNKNOWN: Final = "Unknown"
_KINDS: Final = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
_NSYS: Final = dict(enumerate(_KINDS))
_CUPTI: Final = dict(enumerate(_KINDS, start=1))
_DIRECTIONS: Final = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
_DEVICE: Final = ((_NSYS, 2), (_CUPTI, 3))
_WAY: Final = re.compile(r"(host|device|array|peer|[hdap])[\s_-]*to[\s_-]*(host|device|array|peer|[hdap])$")


@dataclass(frozen=True, slots=True)
class MemoryKinds:
    directions: Mapping[int, str]
    kinds: Mapping[int, str]

    @classmethod
    def of(cls, tables: Tables, copies: str) -> MemoryKinds:
        """The kinds of the numbers in the table ``copies``."""
        directions = {key: _way(label) for key, label in tables.labels("ENUM_CUDA_MEMCPY_OPER").items()}
        kinds = {key: _kind(label) for key, label in tables.labels("ENUM_CUDA_MEM_KIND").items()}
        return cls({**_DIRECTIONS, **directions}, kinds or _numbering(tables, copies))

    @property
    def known(self) -> bool:
        return bool(self.kinds)

    def direction(self, value: object) -> str:
        return self.directions.get(value, UNKNOWN) if isinstance(value, int) else UNKNOWN

    def memory(self, value: object) -> str:
        return self.kinds.get(value, UNKNOWN) if isinstance(value, int) else UNKNOWN


def _way(label: str) -> str:
    """``host-to-device``, ``HtoD`` and the like."""
    match = _WAY.search(label)
    if match is None:
        return UNKNOWN
    return f"{match[1][0]}to{match[2][0]}".replace("h", "H").replace("d", "D").replace("p", "P")


def _kind(label: str) -> str:
    """The longest known kind in the label."""
    plain = label.replace("_", " ")
    named = [kind for kind in _KINDS if kind.lower() in plain]
    return max(named, key=len, default=UNKNOWN)


def _numbering(tables: Tables, copies: str) -> Mapping[int, str]:
    """The numbering by which every copy to or from the host has the device at its other end; empty if neither fits."""
    ends = {
        target if kind == 1 else source
        for kind, source, target in tables.rows(copies, ("copyKind", "srcKind", "dstKind"))
        if kind in (1, 2)
    }
    return next((kinds for kinds, device in _DEVICE if ends == {device}), {})
