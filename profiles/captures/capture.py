"""The content of a capture of any tool: named ranges of the host's threads, and rows of calls and operations.

File formats are read elsewhere. Which ranges make a step is defined by a map (``captures.maps``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..cuda.kineto import KinetoRow

Tool = Literal["nsys", "torch", "vgpu"]


class CaptureFileError(ValueError):
    """A file that is not a capture, or that cannot be read."""


class CapturedRange(NamedTuple):
    """A named range of the program. Instants are in ns on the rows' clock; a mark has equal ones."""

    name: str
    start: int
    end: int
    thread: int
    domain: str = ""
    payload: int | None = None


@dataclass(frozen=True, slots=True)
class ProfilerCapture:
    """``rows`` returns, in order of time, the rows of the process of a thread, or of the busiest process for None.
    ``streams`` are the program's names by the rows' numbers of streams. ``facts`` describe the machine and the tool,
    without any user, host, folder or environment variable. ``missing`` says what the capture lacks, and what follows
    from that."""

    tool: Tool
    spans: Sequence[CapturedRange]
    rows: Callable[[int | None], list[KinetoRow]]
    streams: Mapping[int, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
