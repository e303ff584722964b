"""What a capture holds, whoever made it: named ranges of the host's threads, and rows of calls and operations.

Knows no file format, and nothing of steps: which ranges make a step is a map's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..cuda.kineto import KinetoRow

Tool = Literal["nsys", "torch"]


class CaptureFileError(ValueError):
    """A file that is no capture, or one that cannot be understood."""


class CapturedRange(NamedTuple):
    """A range that the program named. Instants are on the rows' clock, in ns; a mark begins where it ends."""

    name: str
    start: int
    end: int
    thread: int
    domain: str = ""
    payload: int | None = None


@dataclass(frozen=True, slots=True)
class ProfilerCapture:
    """``rows`` gives those of the process that a thread belongs to, or of the busiest one, in order of time.
    ``streams`` are names that the program gave, by the rows' numbers. ``facts`` are of the machine and the tool, and
    name no user, host, folder or environment variable; ``missing`` says what the capture does not tell, and what
    follows from that."""

    tool: Tool
    spans: Sequence[CapturedRange]
    rows: Callable[[int | None], list[KinetoRow]]
    streams: Mapping[int, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
