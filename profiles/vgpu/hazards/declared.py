"""Footprints of custom kernels, as the kernels declare them, computed as late as possible.

The bytes that a kernel touches depend on values; the arguments that it touches, and how, do not. The latter are taken
from a kernel's first launch with arguments of the same form. Later launches only keep the tensors from which the former
follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ....sched.kernels.declare import Access, Kernel
from .blocks import NO_MEMORY, SHADOW, DeviceMemory, ShadowTable, device_tensors
from .footprints import Footprint, Grid, Scattered, Selections, ValueSource, copied, entries
from .shadow import ShadowMemory

Touched = tuple[ShadowMemory, Footprint, bool]


class ArgumentAccess(NamedTuple):
    """An access of a kernel to an argument, or to the ``item`` of one that is a list."""

    argument: int
    item: int | None
    write: bool
    scattered: bool
    order: int  # among the kernel's accesses

    def tensor(self, arguments: Sequence[Any]) -> Any:
        argument = arguments[self.argument]
        return argument if self.item is None else argument[self.item]


class KernelForm(NamedTuple):
    """The accesses of launches with arguments of one form. The scattered ones follow from the arguments ``values``;
    ``computed``: the declaration computes tensors that select rows, instead of naming arguments."""

    accesses: Sequence[ArgumentAccess]
    scattered: Sequence[ArgumentAccess]
    values: Sequence[int]
    computed: bool


Parts = Mapping[int, Scattered]
"""What scattered accesses touch, by their order among the kernel's accesses."""


class DeclaredFootprints:
    def __init__(self, table: ShadowTable) -> None:
        self._table = table
        self._forms: dict[object, KernelForm] = {}
        self._last: dict[Kernel, tuple[object, Parts]] = {}

    def accesses(self, kernel: Kernel, args: Sequence[Any]) -> Sequence[Touched]:
        """The accesses of a launch. Launches that follow each other with equal values, as those of layers and many of
        steps, share footprints."""
        form = self.form(kernel, args)
        if not form.scattered:
            return self.touched(form.accesses, args, {})
        key, (last, parts) = self.key(form, args), self._last.get(kernel, (None, {}))
        if key != last:
            parts = self.parts(kernel, form, args)()
            self._last[kernel] = key, parts
        return self.touched(form.accesses, args, parts)

    def form(self, kernel: Kernel, args: Sequence[Any]) -> KernelForm:
        """The arguments that a launch touches, and how."""
        kinds: Sequence[object] = (*map(type, args),)
        if list in kinds or tuple in kinds:
            kinds = [len(a) if isinstance(a, (list, tuple)) else type(a) for a in args]
        key = (kernel, *kinds)
        form = self._forms.get(key)
        if form is None:
            held = self._held(args)
            form = self._forms[key] = _form(kernel.footprint(*held), held)
        return form

    def parts(self, kernel: Kernel, form: KernelForm, args: Sequence[Any]) -> Callable[[], Parts]:
        """A function that yields what the scattered accesses of a launch touch, by the values that the arguments have
        when it is called; one evaluation of the declaration yields all."""
        tensors = device_tensors(self._table.memory, [args[k] for k in form.values])
        values = list({self._table.block(t).shadow: None for t in tensors if not t.is_floating_point()})
        # A footprint is kept by a storage, from which Python's garbage collector does not find the table.
        kept = partial(_kept, self._table.memory) if form.computed else copied
        evaluated = partial(_evaluated, partial(kernel.footprint, *self._held(args)), kept)
        # Arguments that select rows are the same tensors at all replays of a graph.
        present = evaluated if form.computed else cache(evaluated)

        def parts() -> Parts:
            source = ValueSource(Grid.rows, present)
            self._table.depend(source, values)
            return {
                access.order: Scattered(partial(source.pieces, access.order)) for access in form.scattered
            }

        return parts

    def indexed(self, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Scattered:
        """The footprint of ``tensor[i, j, ...]``, which is that of the tensor's last access by indices if nothing has
        changed."""
        memory, shadow = self._table.memory, self._table.block(tensor).shadow
        key = self._key(tensor, values=False), [self._key(index, values=True) for index in indices]
        last, footprint = shadow.indexed
        if footprint is None or key != last:
            held = [None if index is None else memory.held(index) for index in indices]
            values = {id(index): partial(copied, index) for index in held if index is not None}
            selections = Selections({0: (Grid.of(memory.held(tensor)), (*map(id, held),))}, values)
            source = ValueSource(Grid.at, lambda: selections)
            self._table.depend(source, [self._table.block(i).shadow for i in indices if i is not None])
            footprint = Scattered(partial(source.pieces, 0))
            shadow.indexed = key, footprint
        return footprint

    def _held(self, value: Any) -> Any:
        """The value with the tensors that hold their values in place of device tensors, also in lists."""
        memory = self._table.memory
        if memory.on_device(value):
            return memory.held(value)
        return [*map(self._held, value)] if isinstance(value, (list, tuple)) else value

    def touched(
        self, accesses: Sequence[ArgumentAccess], arguments: Sequence[Any], pieces: Parts
    ) -> Sequence[Touched]:
        part = self._table.part
        return [
            (shadow, pieces[order] if scattered else span, write)
            for argument, item, write, scattered, order in accesses
            for shadow, span in [part(arguments[argument] if item is None else arguments[argument][item])]
            if span.end > span.start
        ]

    def shadow(self, access: ArgumentAccess, arguments: Sequence[Any]) -> ShadowMemory:
        """The shadow memory of an argument that is a device tensor or pinned memory."""
        shadow, _ = self._table.part(access.tensor(arguments))
        assert shadow is not NO_MEMORY, "scattered, on memory that is neither the device's nor pinned"
        return shadow

    def key(self, form: KernelForm, arguments: Sequence[Any]) -> object:
        """Determines the scattered footprints: the values that they follow from, and the geometry of what has them."""
        return (
            *[self._key(arguments[k], values=True) for k in form.values],
            *[self._key(access.tensor(arguments), values=False) for access in form.scattered],
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


def _kept(memory: DeviceMemory, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor. A tensor that a declaration has computed is returned itself, since nothing writes to its
    memory later."""
    shared = not memory.lasting or hasattr(tensor.untyped_storage(), SHADOW) or memory.pinned(tensor)
    return copied(tensor) if shared else tensor


def _evaluated(
    footprint: Callable[[], Sequence[Access]], kept: Callable[[torch.Tensor], torch.Tensor]
) -> Selections:
    accesses: dict[int, tuple[Grid, tuple[object, ...]]] = {}
    values: dict[object, Callable[[], torch.Tensor]] = {}
    for order, (tensor, _, rows, lens, table) in enumerate(footprint()):
        if rows is not None:
            values |= {id(value): partial(kept, value) for value in (rows, lens) if value is not None}
            keys: tuple[object, ...] = id(rows), id(lens), None
            if table is not None and lens is not None:
                keys = (id(table), *keys), None, id(lens)
                values[keys[0]] = partial(entries, table, rows, lens)
            accesses[order] = Grid.of(tensor), keys
    return Selections(accesses, values)


def _form(declared: Sequence[Access], arguments: Sequence[Any]) -> KernelForm:
    """Finds the declared tensors among the arguments. A tensor written as a whole is not also read."""
    places = [
        (id(item), (argument, k if isinstance(value, list) else None))
        for argument, value in enumerate(arguments)
        for k, item in enumerate(value if isinstance(value, list) else [value])
        if isinstance(item, torch.Tensor)
    ]
    at = dict(places)
    whole = {id(tensor) for tensor, write, rows, *_ in declared if write and rows is None}
    accesses = [
        ArgumentAccess(*at[id(tensor)], write, rows is not None, order)
        for order, (tensor, write, rows, *_) in enumerate(declared)
        if write or id(tensor) not in whole
    ]
    scattered = [access for access in accesses if access.scattered]
    tensors = {id(tensor) for _, _, *selection in declared for tensor in selection if tensor is not None}
    computed = len(at) < len(places) or not tensors <= at.keys()
    values = range(len(arguments)) if computed else sorted({at[tensor][0] for tensor in tensors})
    return KernelForm(accesses, scattered, values, computed)
