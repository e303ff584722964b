"""The accesses of a captured graph: the union of its nodes' accesses, compared once per replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from ....sched.kernels.declare import Kernel
from ...platform.machine import VisitingKernel
from .clocks import VectorClocks
from .declared import ArgumentAccess, DeclaredFootprints, Parts
from .footprints import ByteSpan, Footprint, Scattered, joined
from .shadow import AccessHistory, IssuedOp, NamedMemory, ShadowMemory

# Compares a launch's access to memory, by its footprint and whether it writes, with the earlier ones.
Compare = Callable[[IssuedOp, ShadowMemory, Footprint, bool], None]
_FEW = 8  # replays, as a ``WINDOW`` of accesses that keep large copies of values


class StorageGroup:
    """Storages that a graph always accesses together and at the same bytes, as one access of a kernel does in all
    layers.

    A replay adds one access, to a history that the storages share. A storage is compared again only if it was accessed
    otherwise in the meantime, or if something was not ordered at the last comparison.
    """

    def __init__(self, access: ArgumentAccess) -> None:
        self.access = access
        self._shadows: dict[ShadowMemory, None] = {}
        self._uncompared: set[ShadowMemory] = set()  # those that have to be compared at the next replay
        self._named: dict[ShadowMemory, NamedMemory] = {}
        self._histories: dict[int, AccessHistory] = {}
        self._limit = _FEW

    def add(self, shadow: ShadowMemory) -> None:
        self._shadows[shadow] = None
        self._uncompared.add(shadow)

    def __iter__(self) -> Iterator[ShadowMemory]:
        return iter(self._shadows)

    def touch(self, launch: IssuedOp, footprint: Footprint, clocks: VectorClocks, compare: Compare) -> None:
        """Compares the group's access of a replay with the earlier ones, and adds it to them."""
        actor, write = launch.actor, self.access.write
        history = self._histories.get(actor)
        if history is None:
            history = self._histories[actor] = AccessHistory(actor, write=write)
        if self._uncompared:
            for shadow in [shadow for shadow in self._shadows if shadow in self._uncompared]:
                if shadow.named is not None:
                    self._named[shadow] = shadow.named
                compare(launch, shadow, footprint, write)
                shadow.share(history, write=write)
                shadow.settle(self._uncompared, actor, clocks.floor(actor), write=write)
        for named in self._named.values():
            named.note(launch, write=write)
        history.add(launch, footprint)
        if len(history.accesses) > self._limit:
            history.prune(clocks.known()[actor])
            self._limit = 2 * len(history.accesses) + _FEW


class _KernelNodes(NamedTuple):
    """Nodes of one kernel whose footprints follow from the same values, as those of all layers do."""

    parts: Callable[[], Parts]
    arguments: Sequence[Any]  # kept, since a replay reads their memory
    groups: dict[ArgumentAccess, StorageGroup]


class GraphFootprint:
    """The footprint of one capture. Parts that follow from values are computed for each replay; the rest is one
    footprint per storage."""

    def __init__(self, capture: object, declared: DeclaredFootprints) -> None:
        self.capture = capture
        self.visiting: list[VisitingKernel] = []
        self._declared = declared
        self._spans: dict[tuple[ShadowMemory, bool], set[Footprint]] = {}
        self._nodes: dict[object, _KernelNodes] = {}
        # By stream, with the storages whose reads have to be compared at the next replay.
        self._recurring: dict[int, tuple[IssuedOp, set[ShadowMemory]]] = {}

    def touch(self, shadow: ShadowMemory, footprint: Footprint, *, write: bool) -> None:
        known = ByteSpan(0, shadow.size) if type(footprint) is Scattered else footprint
        self._spans.setdefault((shadow, write), set()).add(known)

    def kernel(self, kernel: Kernel, args: Sequence[Any]) -> None:
        declared, form = self._declared, self._declared.form(kernel, args)
        whole = [access for access in form.accesses if not access.scattered]
        for shadow, footprint, write in declared.touched(whole, args, {}):
            self.touch(shadow, footprint, write=write)
        if form.scattered:
            key = (kernel, declared.key(form, args))
            nodes = self._nodes.get(key)
            if nodes is None:
                nodes = self._nodes[key] = _KernelNodes(declared.parts(kernel, form, args), args, {})
            for access in form.scattered:
                nodes.groups.setdefault(access, StorageGroup(access)).add(declared.shadow(access, args))

    @cached_property
    def _written_spans(self) -> Sequence[tuple[ShadowMemory, Footprint]]:
        return [(shadow, joined(spans)) for (shadow, write), spans in self._spans.items() if write]

    @cached_property
    def followed(self) -> set[ShadowMemory]:
        """Of the storages that a replay writes, those that something follows from. Read when the capture is over:
        memory that only this graph can reach is dropped."""
        self._spans = {key: span for key, span in self._spans.items() if not key[0].out_of_reach}
        groups = [group for nodes in self._nodes.values() for group in nodes.groups.values()]
        written = {
            *(shadow for shadow, _ in self._written_spans),
            *(shadow for group in groups if group.access.write for shadow in group),
        }
        followed = {shadow for shadow in written if shadow.is_followed}
        for shadow in written:
            shadow.followed_of_graphs += (followed,)
        return followed

    @cached_property
    def _read_spans(self) -> Mapping[ShadowMemory, tuple[int, Footprint]]:
        """The spans that a replay reads, with numbers that order them."""
        reads = [(shadow, joined(spans)) for (shadow, write), spans in self._spans.items() if not write]
        return {shadow: (number, span) for number, (shadow, span) in enumerate(reads)}

    def spans(self, launch: IssuedOp, clocks: VectorClocks, add: Compare) -> None:
        """Compares and adds a replay's accesses to spans; ``add`` does both. Reads of memory that was not accessed
        otherwise since the last replay are not repeated: the recurring launch that stands for them is renewed."""
        for shadow, span in self._written_spans:
            add(launch, shadow, span, True)
        reads, actor = self._read_spans, launch.actor
        recurring = self._recurring.get(actor)
        if recurring is None:
            recurring = self._recurring[actor] = replace(launch, recurring=True), set(reads)
        last, uncompared = recurring
        last.renew(launch)
        for shadow in sorted(uncompared, key=reads.__getitem__):
            add(last, shadow, reads[shadow][1], False)
            shadow.settle(uncompared, actor, clocks.floor(actor), write=False)

    def scattered(self, launch: IssuedOp, clocks: VectorClocks, compare: Compare) -> None:
        """Compares and adds a replay's accesses that follow from values."""
        for nodes in self._nodes.values():
            pieces = nodes.parts()
            for access, group in nodes.groups.items():
                group.touch(launch, pieces[access.order], clocks, compare)
