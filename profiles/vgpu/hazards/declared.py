"""Footprints of custom kernels, as they declare them themselves, worked out as late as possible.

What a kernel touches depends on values; which of its arguments it touches, and how, does not. The latter is learnt
from a kernel's first launch with such arguments; later launches only say from what the rest would follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ....sched.kernels.registry import Access, Kernel
from .footprints import ByteSpan, Footprint, Grid, Pieces, RowSelection, Scattered, copied, span
from .memory import Memory
from .shadows import Shadow

if TYPE_CHECKING:
    from .checker import Checker

Touched = tuple[Shadow, Footprint, bool]


class ArgumentAccess(NamedTuple):
    """An access of a kernel: the argument, and the item where that is a list."""

    argument: int
    item: int | None
    write: bool
    scattered: bool
    order: int  # among the kernel's accesses

    def of(self, arguments: Sequence[Any]) -> Any:
        argument = arguments[self.argument]
        return argument if self.item is None else argument[self.item]


class Declared:
    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._look = _Look(checker.memory)
        self._places: dict[object, Sequence[ArgumentAccess]] = {}
        self._last: dict[Kernel, tuple[object, Mapping[int, Scattered]]] = {}

    def accesses(self, kernel: Kernel, args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[Touched]:
        """What a launch touches. Layers that follow each other share what they have in common."""
        places = self.places(kernel, args, named)
        if not any(place.scattered for place in places):
            return self.touched(places, (*args, *named.values()), {})
        arguments = (*args, *named.values())
        key, (last, pieces) = self.key(arguments), self._last.get(kernel, (None, {}))
        if key != last:
            pieces = self.pieces(kernel, places, args, named)
            self._last[kernel] = key, pieces
        return self.touched(places, arguments, pieces)

    def places(
        self, kernel: Kernel, args: Sequence[Any], named: Mapping[str, Any]
    ) -> Sequence[ArgumentAccess]:
        arguments = (*args, *named.values())
        shape = (kernel, *named, *(len(a) if isinstance(a, (list, tuple)) else a is None for a in arguments))
        places = self._places.get(shape)
        if places is None:
            seen, named_so = self._look.all(args), self._look.named(named)
            declared = kernel.footprint(*seen, **named_so)
            places = self._places[shape] = list(_places(declared, (*seen, *named_so.values())))
        return places

    def pieces(
        self, kernel: Kernel, places: Sequence[ArgumentAccess], args: Sequence[Any], named: Mapping[str, Any]
    ) -> Mapping[int, Scattered]:
        """The footprints that follow from values, one evaluation for all."""
        look = self._look
        declared = _Once(partial(kernel.footprint, *look.all(args), **look.named(named)))
        lenders = [t for t in look.tensors((*args, *named.values())) if not t.is_floating_point()]
        pieces = {p.order: Scattered(_Part(declared, p.order)) for p in places if p.scattered}
        for footprint in pieces.values():
            self._checker.lend(footprint, lenders)
        return pieces

    def touched(
        self, places: Sequence[ArgumentAccess], arguments: Sequence[Any], pieces: Mapping[int, Scattered]
    ) -> Iterator[Touched]:
        for place in places:
            argument = place.of(arguments)
            shadow = self._checker.shadow_of(argument)
            if shadow is not None and argument.numel():
                yield shadow, pieces[place.order] if place.scattered else self._whole(argument), place.write

    def shadows(self, places: Sequence[ArgumentAccess], arguments: Sequence[Any]) -> Iterator[Shadow]:
        """Of arguments that are device tensors or pinned memory."""
        for place in places:
            shadow = self._checker.shadow_of(place.of(arguments))
            assert shadow is not None, "a footprint by values on memory that nobody else touches"
            yield shadow

    def key(self, arguments: Sequence[Any]) -> object:
        """What the footprints follow from: the state of integer tensors, the geometry of the others."""
        return tuple(self._part(argument) for argument in arguments)

    def _part(self, argument: Any) -> object:
        checker = self._checker
        if checker.memory.mine(argument):
            shadow = checker.block(argument).shadow
            where = 0 if argument.is_floating_point() else (shadow, shadow.epoch)
            return where, checker.memory.span(argument), argument.size()
        if isinstance(argument, (list, tuple)):
            return tuple(self._part(item) for item in argument)
        return argument.size() if isinstance(argument, torch.Tensor) else argument

    def _whole(self, argument: torch.Tensor) -> ByteSpan:
        memory = self._checker.memory
        return memory.span(argument) if memory.mine(argument) else span(argument)


class _Once:
    """A kernel's footprint, evaluated when the first of its accesses is asked for or its values are about to change.
    Accesses of the same rows of tensors alike, such as keys and values, share their pieces."""

    def __init__(self, footprint: Callable[[], Sequence[Access]]) -> None:
        self._footprint: Callable[[], Sequence[Access]] | None = footprint
        self._accesses: Sequence[tuple[Grid, RowSelection]] = ()
        self._pieces: dict[object, Pieces] = {}

    def freeze(self) -> None:
        if self._footprint is not None:
            copies = _Copies()
            self._accesses = [
                (Grid.of(tensor), RowSelection(copies(rows), copies(lens), copies(counts)))
                for tensor, _, rows, lens, counts in self._footprint()
            ]
            self._footprint = None

    def pieces(self, order: int) -> Pieces:
        self.freeze()
        grid, lines = self._accesses[order]
        key = (grid, *map(id, lines))
        if key not in self._pieces:
            self._pieces[key] = grid.rows(lines)
        return self._pieces[key]


class _Copies:
    """One copy of each tensor."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, copied(tensor)
        return self._made[id(tensor)][1]


class _Part(NamedTuple):
    """One access of a footprint."""

    whole: _Once
    order: int

    def freeze(self) -> None:
        self.whole.freeze()

    def pieces(self) -> Pieces:
        return self.whole.pieces(self.order)


class _Look(NamedTuple):
    """Device tensors among arguments, and how they are looked at."""

    memory: Memory

    def all(self, values: Iterable[Any]) -> list[Any]:
        return [
            self.memory.held(value)
            if self.memory.mine(value)
            else self.all(value)
            if isinstance(value, (list, tuple))
            else value
            for value in values
        ]

    def named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(values, self.all(values.values()), strict=True))

    def tensors(self, arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
        for argument in arguments:
            if self.memory.mine(argument):
                yield argument
            elif isinstance(argument, (list, tuple)):
                yield from self.tensors(argument)


def _places(declared: Sequence[Access], arguments: Sequence[Any]) -> Iterator[ArgumentAccess]:
    """Where each access's tensor is found among the arguments. A tensor written as a whole is not also read."""
    at: dict[int, tuple[int, int | None]] = {}
    for argument, value in enumerate(arguments):
        if isinstance(value, torch.Tensor):
            at[id(value)] = (argument, None)
        elif isinstance(value, list):
            at.update({id(item): (argument, k) for k, item in enumerate(value)})
    whole = {id(tensor) for tensor, write, rows, *_ in declared if write and rows is None}
    for order, (tensor, write, rows, *_) in enumerate(declared):
        if write or id(tensor) not in whole:
            yield ArgumentAccess(*at[id(tensor)], write, rows is not None, order)
