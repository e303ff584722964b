"""What a captured graph touches: the union of its nodes' accesses, once per replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ....sched.kernels.registry import Kernel
from .declared import Declared, Place, Touched
from .footprints import Footprint, Span
from .shadows import Launch, Shadow

if TYPE_CHECKING:
    from ..graph import Capture


class _Node:
    """Nodes of one kernel whose footprints follow from the same values, as those of all layers do."""

    def __init__(
        self, kernel: Kernel, places: Sequence[Place], args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        self.call = (kernel, places, args, named)
        self.touched: dict[tuple[Shadow, Place], None] = {}


class Recording:
    """Footprints that follow from values are worked out anew for each replay; the rest is one hull per storage."""

    def __init__(self, capture: Capture, declared: Declared) -> None:
        self.capture = capture
        self._declared = declared
        self._hulls: dict[tuple[Shadow, bool], Span] = {}
        self._nodes: dict[object, _Node] = {}
        self._shared = False
        self._standing: dict[int, tuple[Launch, dict[tuple[Shadow, bool], int]]] = {}  # by stream

    def touch(self, shadow: Shadow, footprint: Footprint, *, write: bool) -> None:
        new = footprint if type(footprint) is Span else Span(0, shadow.size)
        old = self._hulls.get((shadow, write), new)
        self._hulls[shadow, write] = Span(min(old.start, new.start), max(old.end, new.end))

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
            node.touched.update(
                dict.fromkeys(zip(declared.shadows(scattered, arguments), scattered, strict=True))
            )

    def written(self) -> Iterable[Shadow]:
        self._forget_private()
        return {
            *(shadow for shadow, write in self._hulls if write),
            *(shadow for node in self._nodes.values() for shadow, place in node.touched if place.write),
        }

    def accesses(self, launch: Launch) -> Iterator[tuple[Launch, Touched]]:
        """Of a replay. Reads of what nobody wrote since the last one are not told again: that one is renewed."""
        for (shadow, write), hull in self._hulls.items():
            if write:
                yield launch, (shadow, hull, write)
        yield from self._reads(launch)
        for node in self._nodes.values():
            pieces = self._declared.pieces(*node.call)
            for shadow, place in node.touched:
                yield launch, (shadow, pieces[place.order], place.write)

    def _reads(self, launch: Launch) -> Iterator[tuple[Launch, Touched]]:
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
