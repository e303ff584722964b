"""Pictures as plain data: lanes in time, idle time by cause, and what waited for what in a few representative steps.

Renderers derive from this and from nothing else. Instants are ns from the start of a scene.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
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
    could go on at ``end`` after ``waited`` ns. Lanes are named by their labels."""

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
    kind: str


class Scene(NamedTuple):
    """Consecutive steps of one kind. ``first``: the first forward kernel of the first of them."""

    title: str
    end: int
    first: int
    lanes: tuple[Lane, ...]
    arrows: tuple[Arrow, ...]
    boundaries: tuple[Boundary, ...]


Picture = tuple[Scene, ...]


def stacked(pictures: Mapping[str, Picture]) -> Picture:
    """The scenes of several pictures of the same kinds of steps, the first picture above the others on one axis. Scenes
    are aligned at the first forward of each."""
    parts: dict[str, dict[str, Scene]] = {}
    for group, picture in pictures.items():
        for scene in picture:
            kind = next(boundary.kind for boundary in scene.boundaries if boundary.at >= scene.first)
            parts.setdefault(kind, {})[group] = scene
    return tuple(map(_above, parts.values()))


def _above(parts: Mapping[str, Scene]) -> Scene:
    latest = max(scene.first for scene in parts.values())
    moved = [_moved(scene, group, latest - scene.first) for group, scene in parts.items()]
    return Scene(
        "; ".join(f"{group}: {scene.title}" for group, scene in parts.items()),
        max(scene.end for scene in moved),
        latest,
        tuple(chain.from_iterable(scene.lanes for scene in moved)),
        tuple(chain.from_iterable(scene.arrows for scene in moved)),
        tuple(chain.from_iterable(scene.boundaries for scene in moved)),
    )


def _moved(scene: Scene, group: str, by: int) -> Scene:
    def named(label: str) -> str:
        return f"{group} {label}".strip()

    def later(slices: Iterable[Slice]) -> tuple[Slice, ...]:
        return tuple(piece._replace(start=piece.start + by, end=piece.end + by) for piece in slices)

    return scene._replace(
        end=scene.end + by,
        lanes=tuple(Lane(named(lane.group), lane.name, later(lane.slices)) for lane in scene.lanes),
        arrows=tuple(
            a._replace(source=named(a.source), target=named(a.target), start=a.start + by, end=a.end + by)
            for a in scene.arrows
        ),
        boundaries=tuple(b._replace(group=named(b.group), at=b.at + by) for b in scene.boundaries),
    )


def counted(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """How many of the spans are open, at each instant at which that changes."""
    open_now, found = 0, dict[int, int]()
    for at, by in sorted((at, by) for start, end in spans for at, by in ((start, 1), (end, -1))):
        open_now += by
        found[at] = open_now
    return list(found.items())
