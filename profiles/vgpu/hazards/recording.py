"""What a captured graph touches: the union of its nodes' accesses, once per replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....sched.kernels.registry import Kernel
from .clocks import Clock
from .declared import ArgumentAccess, Declared, Touched
from .footprints import ByteSpan, Footprint
from .shadows import WINDOW, Entry, IssuedOp, Lane, Shadow

Race = tuple[Shadow, Entry]


class Together:
    """Storages that a graph always touches at once and in the same places, as one place of a kernel does in all layers.

    A replay is told once, in a lane that they have in common. A storage is looked at again only if somebody else was
    there since, or if something was not ordered yet the last time.
    """

    def __init__(self, place: ArgumentAccess) -> None:
        self.place = place
        self.shadows: dict[Shadow, int] = {}  # with the changes that were compared, -1 for none
        self._lanes: dict[int, Lane] = {}
        self._limit = WINDOW

    def touch(self, launch: IssuedOp, footprint: Footprint, known: Callable[[], Clock]) -> Iterator[Race]:
        """Earlier accesses that race with this one, which is remembered."""
        actor, write = launch.actor, self.place.write
        lane = self._lanes.setdefault(actor, Lane(actor))
        for shadow, compared in self.shadows.items():
            if shadow.pool is not None:
                shadow.pool.note(launch, write=write)
            if shadow.changes != compared or shadow.common != {actor}:
                yield from ((shadow, entry) for entry in shadow.unordered(launch, footprint, write=write))
                shadow.share(lane, write=write)
                settled = shadow.settled(launch, write=write)
                self.shadows[shadow] = shadow.changes if settled else -1
        lane.add(Entry(launch, footprint, write))
        if len(lane.entries) > self._limit:
            lane.prune(known()[actor])
            self._limit = 2 * len(lane.entries) + WINDOW


class _Node:
    """Nodes of one kernel whose footprints follow from the same values, as those of all layers do."""

    def __init__(
        self, kernel: Kernel, places: Sequence[ArgumentAccess], args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        self.call = (kernel, places, args, named)
        self.together: dict[ArgumentAccess, Together] = {}

    def add(self, shadow: Shadow, place: ArgumentAccess) -> None:
        self.together.setdefault(place, Together(place)).shadows[shadow] = -1


class FootprintRecording:
    """Footprints that follow from values are worked out anew for each replay; the rest is one hull per storage."""

    def __init__(self, capture: object, declared: Declared) -> None:
        self.capture = capture
        self._declared = declared
        self._hulls: dict[tuple[Shadow, bool], ByteSpan] = {}
        self._nodes: dict[object, _Node] = {}
        self._shared = False
        self._standing: dict[int, tuple[IssuedOp, dict[tuple[Shadow, bool], int]]] = {}  # by stream

    def touch(self, shadow: Shadow, footprint: Footprint, *, write: bool) -> None:
        new = footprint if type(footprint) is ByteSpan else ByteSpan(0, shadow.size)
        old = self._hulls.get((shadow, write), new)
        self._hulls[shadow, write] = ByteSpan(min(old.start, new.start), max(old.end, new.end))

    def kernel(self, kernel: Kernel, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        declared, arguments = self._declared, (*args, *named.values())
        places = declared.places(kernel, args, named)
        for shadow, footprint, write in declared.touched(
            [p for p in places if not p.scattered], arguments, {}
        ):
            self.touch(shadow, footprint, write=write)
        scattered = [place for place in places if place.scattered]
        if scattered:
            key = (kernel, declared.key(arguments))
            node = self._nodes.setdefault(key, _Node(kernel, places, args, named))
            for shadow, place in zip(declared.shadows(scattered, arguments), scattered, strict=True):
                node.add(shadow, place)

    def written(self) -> Iterable[Shadow]:
        self._forget_private()
        return {
            *(shadow for shadow, write in self._hulls if write),
            *(
                s
                for node in self._nodes.values()
                for p, t in node.together.items()
                if p.write
                for s in t.shadows
            ),
        }

    def accesses(self, launch: IssuedOp) -> Iterator[tuple[IssuedOp, Touched]]:
        """Of a replay. Reads of what nobody wrote since the last one are not told again: that one is renewed."""
        for (shadow, write), hull in self._hulls.items():
            if write:
                yield launch, (shadow, hull, write)
        yield from self._reads(launch)

    def scattered(self, launch: IssuedOp, known: Callable[[], Clock]) -> Iterator[tuple[bool, Race]]:
        """Of a replay: what races with its accesses to places that follow from values, and whether those write."""
        for node in self._nodes.values():
            pieces = self._declared.pieces(*node.call)
            for place, together in node.together.items():
                for race in together.touch(launch, pieces[place.order], known):
                    yield place.write, race

    def _reads(self, launch: IssuedOp) -> Iterator[tuple[IssuedOp, Touched]]:
        standing = self._standing.get(launch.actor)
        if standing is None:
            last = replace(launch, standing=True)
            standing = self._standing[launch.actor] = last, {key: -1 for key in self._hulls if not key[1]}
        last, epochs = standing
        last.renew(launch)
        for (shadow, _), epoch in epochs.items():
            if shadow.epoch != epoch:
                epochs[shadow, False] = shadow.epoch
                yield last, (shadow, self._hulls[shadow, False], False)

    def _forget_private(self) -> None:
        """Memory that nobody but this graph can reach needs no watching. Known once the capture is over."""
        if not self._shared:
            self._hulls = {key: hull for key, hull in self._hulls.items() if not key[0].out_of_reach}
            self._shared = True
