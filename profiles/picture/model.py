"""Pictures as plain data: lanes in time, idle time by cause, and what waited for what in a few representative steps.

Renderers derive from this and from nothing else. Instants are ns from the start of a scene.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from ..measure.waiting import Cause
from ..record.definitions import IDLE_NAMES

Activity = Literal["phase", "stall", "kernel", "copy", "held"]
Kind = Activity | Cause
_CAUSES: Final[Sequence[Cause]] = (
    *("exposed_host", "exposed_stall", "launch_latency"),
    *("dependency", "kernel_gap", "no_work"),
)
# What a kind is called, in the order of legends.
KINDS: Final[Mapping[Kind, str]] = {
    "phase": "host work",
    "stall": "host waits for the device",
    "kernel": "kernel",
    "copy": "copy",
    "held": "stream waits for an event",
    **{cause: f"idle: {IDLE_NAMES[cause]}" for cause in _CAUSES},
}
HOST: Final = "host"
IDLE: Final = "GPU idle"


class Slice(NamedTuple):
    """Something that took time. ``line`` is the source line of a copy, launch or wait, as FILE:LINE."""

    kind: Kind
    name: str
    start: int
    end: int
    step: int
    line: str = ""
    statement: str = ""


class Lane(NamedTuple):
    """``group`` is a rank or a side of a comparison, empty where there is only one. Slices are in the order of their
    starts; the only ones that overlap are stalls, which lie on the phase that they interrupt."""

    group: str
    name: str
    slices: tuple[Slice, ...]

    @property
    def label(self) -> str:
        return f"{self.group} {self.name}".strip()


class Arrow(NamedTuple):
    """A wait: from the end of the operation ``name`` on the lane ``source`` to the waiter on the lane ``target``, which
    could go on at ``end`` after ``waited`` ns. Lanes are named by their labels; ``source`` is empty, and ``name`` that
    of the call, where the host waited for another rank."""

    source: str
    start: int
    target: str
    end: int
    waited: int
    name: str
    line: str = ""
    statement: str = ""


class Boundary(NamedTuple):
    """The first forward kernel of a step."""

    group: str
    at: int
    step: int


class Scene(NamedTuple):
    """Consecutive steps of one kind."""

    title: str
    end: int
    lanes: tuple[Lane, ...]
    arrows: tuple[Arrow, ...]
    boundaries: tuple[Boundary, ...]


Picture = tuple[Scene, ...]
