"""Footprints of custom kernels, as the kernels declare them, computed as late as possible.

The bytes that a kernel touches depend on values; the arguments that it touches, and how, do not. The latter are taken
from a kernel's first launch with arguments of the same form. Later launches only keep the tensors from which the former
follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ....sched.kernels.declare import Access, Kernel
from .blocks import NO_MEMORY, SHADOW, DeviceMemory, ShadowTable, device_tensors
from .footprints import CLOSED, Footprint, Grid, IndexedSource, Pieces, RowSelection, Scattered, copied
from .shadow import ShadowMemory

Touched = tuple[ShadowMemory, Footprint, bool]


class Place(NamedTuple):
    """Where a tensor is among a kernel's arguments: an argument, or an item of one that is a list."""

    argument: int
    item: int | None

    def of(self, arguments: Sequence[Any]) -> Any:
        argument = arguments[self.argument]
        return argument if self.item is None else argument[self.item]


class ArgumentAccess(NamedTuple):
    """An access of a kernel to the tensor at ``place``."""

    place: Place
    write: bool
    scattered: bool
    order: int  # among the kernel's accesses


class KernelForm(NamedTuple):
    """The accesses of launches with arguments of one form. The scattered ones follow from the arguments ``values``;
    ``computed``: the declaration computes tensors that select rows, instead of naming arguments."""

    accesses: Sequence[ArgumentAccess]
    whole: Sequence[ArgumentAccess]
    scattered: Sequence[ArgumentAccess]
    values: Sequence[int]
    computed: bool


Selections = Mapping[int, tuple[Grid, RowSelection]]
"""What scattered accesses touch, by their order among the kernel's accesses."""


class KernelCall(NamedTuple):
    """The declared footprint of a launch, which is a function of the present values of some storages."""

    form: KernelForm
    selections: Callable[[], Selections]
    values: Sequence[ShadowMemory]


class DeclaredFootprints:
    def __init__(self, table: ShadowTable) -> None:
        self._table = table
        self._forms: dict[object, KernelForm] = {}
        self._last: dict[Kernel, tuple[object, Mapping[int, Scattered]]] = {}

    def accesses(self, kernel: Kernel, args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[Touched]:
        """The accesses of a launch. Launches that follow each other with equal values, as those of layers and many of
        steps, share footprints."""
        form = self.form(kernel, args, named)
        arguments = (*args, *named.values()) if named else args
        if not form.scattered:
            return self.touched(form.accesses, arguments, {})
        key, (last, pieces) = self.key(form, arguments), self._last.get(kernel, (None, {}))
        if key != last:
            pieces = self.pieces(self.call(kernel, form, args, named))
            self._last[kernel] = key, pieces
        return self.touched(form.accesses, arguments, pieces)

    def form(self, kernel: Kernel, args: Sequence[Any], named: Mapping[str, Any]) -> KernelForm:
        """The arguments that a launch touches, and how."""
        arguments = (*args, *named.values()) if named else args
        kinds: Sequence[object] = (*map(type, arguments),)
        if list in kinds or tuple in kinds:
            kinds = [len(a) if isinstance(a, (list, tuple)) else type(a) for a in arguments]
        key = (kernel, *named, *kinds)
        form = self._forms.get(key)
        if form is None:
            held, held_named = self._held(args, named)
            declared = kernel.footprint(*held, **held_named)
            form = self._forms[key] = _form(declared, (*held, *held_named.values()))
        return form

    def call(
        self, kernel: Kernel, form: KernelForm, args: Sequence[Any], named: Mapping[str, Any]
    ) -> KernelCall:
        held, held_named = self._held(args, named)
        arguments = (*args, *named.values())
        tensors = device_tensors(self._table.memory, [arguments[k] for k in form.values])
        values = {self._table.block(t).shadow: None for t in tensors if not t.is_floating_point()}
        evaluated = partial(_evaluated, partial(kernel.footprint, *held, **held_named))
        # Arguments that select rows are the same tensors at all replays of a graph.
        return KernelCall(form, evaluated if form.computed else cache(evaluated), list(values))

    def indexed(self, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Scattered:
        """The footprint of ``tensor[i, j, ...]``, which is that of the tensor's last access by indices if nothing has
        changed."""
        memory, shadow = self._table.memory, self._table.block(tensor).shadow
        key = self._key(tensor, values=False), [self._key(index, values=True) for index in indices]
        last, footprint = shadow.indexed
        if footprint is None or key != last:
            given = [index for index in indices if index is not None]
            held = [None if index is None else memory.held(index) for index in indices]
            source = IndexedSource(Grid.of(memory.held(tensor)), held)
            self._table.depend(source, [self._table.block(index).shadow for index in given])
            footprint = Scattered(source.pieces)
            shadow.indexed = key, footprint
        return footprint

    def _held(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with the tensors that hold their values in place of device tensors."""
        memory = self._table.memory

        def held(value: Any) -> Any:
            if memory.on_device(value):
                return memory.held(value)
            return [*map(held, value)] if isinstance(value, (list, tuple)) else value

        return [*map(held, args)], {name: held(value) for name, value in named.items()}

    def pieces(self, call: KernelCall) -> Mapping[int, Scattered]:
        """The footprints that depend on values, which one evaluation of the declaration yields."""
        declared = _KernelFootprint(call.selections, self._table.memory)
        self._table.depend(declared, call.values)
        return {a.order: Scattered(partial(declared.pieces, a.order)) for a in call.form.scattered}

    def touched(
        self, accesses: Sequence[ArgumentAccess], arguments: Sequence[Any], pieces: Mapping[int, Scattered]
    ) -> Iterator[Touched]:
        for (argument, item), write, scattered, order in accesses:
            tensor = arguments[argument] if item is None else arguments[argument][item]
            shadow, span = self._table.part(tensor)
            if span.end > span.start:
                yield shadow, pieces[order] if scattered else span, write

    def shadows(self, accesses: Sequence[ArgumentAccess], arguments: Sequence[Any]) -> Iterator[ShadowMemory]:
        """The shadow memory of arguments that are device tensors or pinned memory."""
        for access in accesses:
            shadow, _ = self._table.part(access.place.of(arguments))
            assert shadow is not NO_MEMORY, (
                "a scattered footprint on memory that is neither the device's nor pinned"
            )
            yield shadow

    def key(self, form: KernelForm, arguments: Sequence[Any]) -> object:
        """Determines the scattered footprints: the values that they follow from, and the geometry of what has them."""
        return (
            *[self._key(arguments[k], values=True) for k in form.values],
            *[self._key(access.place.of(arguments), values=False) for access in form.scattered],
        )

    def _key(self, argument: Any, *, values: bool) -> object:
        if self._table.memory.on_device(argument):
            shadow, part = self._table.part(argument)
            if not values or argument.is_floating_point():
                return part, argument.size()
            shadow.follow()
            return shadow, shadow.epoch, part, argument.size()
        if isinstance(argument, (list, tuple)):
            return tuple(self._key(item, values=values) for item in argument)
        if isinstance(argument, torch.Tensor):  # the host may write to its memory at any time
            return object() if values and not argument.is_floating_point() else argument.size()
        return argument


class _KernelFootprint:
    """A kernel's footprint, evaluated when the first of its accesses is compared or the values are about to change.
    Accesses to the same rows of tensors of one geometry, such as keys and values, share their pieces."""

    def __init__(self, selections: Callable[[], Selections], memory: DeviceMemory) -> None:
        self._memory = memory
        self._present: Callable[[], Selections] | None = selections
        self._selections: Selections = {}
        self._pieces: dict[object, Pieces] = {}

    def freeze(self) -> None:
        if self._present is not None:
            present, self._present = self._present(), None
            tensors = {id(t): t for _, selection in present.values() for t in selection if t is not None}
            copies = {key: self._copied(tensor) for key, tensor in tensors.items()}
            self._selections = {
                order: (grid, RowSelection(*[copies.get(id(tensor)) for tensor in selection]))
                for order, (grid, selection) in present.items()
            }

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor. A tensor that the declaration has computed is returned itself, since nothing writes to
        its memory later."""
        memory, storage = self._memory, tensor.untyped_storage()
        shared = not memory.lasting or hasattr(storage, SHADOW) or memory.pinned(tensor)
        return copied(tensor) if shared else tensor

    def drop(self) -> None:
        self._present, self._selections = None, {}

    def pieces(self, order: int) -> Pieces:
        self.freeze()
        assert self._selections, CLOSED
        grid, selection = self._selections[order]
        key = (grid, *map(id, selection))
        if key not in self._pieces:
            self._pieces[key] = grid.rows(selection)
        return self._pieces[key]


def _evaluated(footprint: Callable[[], Sequence[Access]]) -> Selections:
    return {
        order: (Grid.of(tensor), RowSelection(*selection))
        for order, (tensor, _, *selection) in enumerate(footprint())
        if selection[0] is not None
    }


def _form(declared: Sequence[Access], arguments: Sequence[Any]) -> KernelForm:
    """Finds the declared tensors among the arguments. A tensor written as a whole is not also read."""
    places = [
        (id(item), Place(argument, k if isinstance(value, list) else None))
        for argument, value in enumerate(arguments)
        for k, item in enumerate(value if isinstance(value, list) else [value])
        if isinstance(item, torch.Tensor)
    ]
    at = dict(places)
    whole = {id(tensor) for tensor, write, rows, *_ in declared if write and rows is None}
    accesses = [
        ArgumentAccess(at[id(tensor)], write, rows is not None, order)
        for order, (tensor, write, rows, *_) in enumerate(declared)
        if write or id(tensor) not in whole
    ]
    whole_ones, scattered = ([one for one in accesses if one.scattered is kind] for kind in (False, True))
    tensors = {id(tensor) for _, _, *selection in declared for tensor in selection if tensor is not None}
    computed = len(at) < len(places) or not tensors <= at.keys()
    values = range(len(arguments)) if computed else sorted({at[tensor].argument for tensor in tensors})
    return KernelForm(accesses, whole_ones, scattered, values, computed)
