"""Footprints of custom kernels, as the kernels declare them, computed as late as possible.

The bytes that a kernel touches depend on values; the arguments that it touches, and how, do not. The latter are taken
from a kernel's first launch with arguments of the same form. Later launches only keep the tensors from which the former
follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ....sched.kernels.declare import Access, Kernel
from .blocks import ShadowTable, device_tensors
from .footprints import CLOSED, Footprint, Grid, Pieces, RowSelection, Scattered, copied, span
from .shadow import ShadowMemory

Touched = tuple[ShadowMemory, Footprint, bool]


class ArgumentAccess(NamedTuple):
    """An access of a kernel: to an argument, or to an item of an argument that is a list."""

    argument: int
    item: int | None
    write: bool
    scattered: bool
    order: int  # among the kernel's accesses

    def of(self, arguments: Sequence[Any]) -> Any:
        argument = arguments[self.argument]
        return argument if self.item is None else argument[self.item]


class KernelForm(NamedTuple):
    """The accesses of launches with arguments of one form."""

    accesses: Sequence[ArgumentAccess]
    whole: Sequence[ArgumentAccess]
    scattered: Sequence[ArgumentAccess]


class KernelCall(NamedTuple):
    """The declared footprint of a launch, which is a function of the present ``values`` of some arguments."""

    form: KernelForm
    footprint: partial[tuple[Access, ...]]
    values: Sequence[torch.Tensor]


class DeclaredFootprints:
    def __init__(self, table: ShadowTable) -> None:
        self._table = table
        self._forms: dict[object, KernelForm] = {}
        self._last: dict[Kernel, tuple[object, Mapping[int, Scattered]]] = {}

    def accesses(self, kernel: Kernel, args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[Touched]:
        """The accesses of a launch. Consecutive launches with equal values, as those of layers, share footprints."""
        form = self.form(kernel, args, named)
        arguments = (*args, *named.values()) if named else args
        if not form.scattered:
            return self.touched(form.accesses, arguments, {})
        key, (last, pieces) = self.key(arguments), self._last.get(kernel, (None, {}))
        if key != last:
            pieces = self.pieces(self.call(kernel, form, args, named))
            self._last[kernel] = key, pieces
        return self.touched(form.accesses, arguments, pieces)

    def form(self, kernel: Kernel, args: Sequence[Any], named: Mapping[str, Any]) -> KernelForm:
        """The arguments that a launch touches, and how."""
        arguments = (*args, *named.values()) if named else args
        key = (kernel, *named, *[len(a) if isinstance(a, (list, tuple)) else a is None for a in arguments])
        form = self._forms.get(key)
        if form is None:
            held, held_named = self._held(args, named)
            declared = kernel.footprint(*held, **held_named)
            accesses = list(_accesses(declared, (*held, *held_named.values())))
            parts = ([access for access in accesses if access.scattered is kind] for kind in (False, True))
            form = self._forms[key] = KernelForm(accesses, *parts)
        return form

    def call(
        self, kernel: Kernel, form: KernelForm, args: Sequence[Any], named: Mapping[str, Any]
    ) -> KernelCall:
        held, held_named = self._held(args, named)
        tensors = device_tensors(self._table.memory, (*args, *named.values()))
        values = [tensor for tensor in tensors if not tensor.is_floating_point()]
        return KernelCall(form, partial(kernel.footprint, *held, **held_named), values)

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
        declared = _KernelFootprint(call.footprint)
        self._table.depend(declared, call.values)
        return {a.order: Scattered(partial(declared.pieces, a.order)) for a in call.form.scattered}

    def touched(
        self, accesses: Sequence[ArgumentAccess], arguments: Sequence[Any], pieces: Mapping[int, Scattered]
    ) -> Iterator[Touched]:
        table, memory = self._table, self._table.memory
        for at, item, write, scattered, order in accesses:
            argument = arguments[at] if item is None else arguments[at][item]
            shadow = table.of_argument(argument)
            if shadow is not None and argument.numel():
                if scattered:
                    footprint: Footprint = pieces[order]
                else:
                    footprint = span(argument) if shadow.pinned else memory.span(argument)
                yield shadow, footprint, write

    def shadows(self, accesses: Sequence[ArgumentAccess], arguments: Sequence[Any]) -> Iterator[ShadowMemory]:
        """The shadow memory of arguments that are device tensors or pinned memory."""
        for access in accesses:
            shadow = self._table.of_argument(access.of(arguments))
            assert shadow is not None, (
                "a scattered footprint on memory that is neither the device's nor pinned"
            )
            yield shadow

    def key(self, arguments: Sequence[Any]) -> object:
        """Determines the footprints: the state of integer tensors, the geometry of the others."""
        return tuple([self._key(argument) for argument in arguments])

    def _key(self, argument: Any) -> object:
        memory = self._table.memory
        if memory.on_device(argument):
            shadow = self._table.block(argument).shadow
            state = 0 if argument.is_floating_point() else (shadow, shadow.epoch)
            return state, memory.span(argument), argument.size()
        if isinstance(argument, (list, tuple)):
            return tuple(self._key(item) for item in argument)
        return argument.size() if isinstance(argument, torch.Tensor) else argument


class _KernelFootprint:
    """A kernel's footprint, evaluated when the first of its accesses is compared or the values are about to change.
    Accesses to the same rows of tensors of one geometry, such as keys and values, share their pieces."""

    def __init__(self, footprint: partial[tuple[Access, ...]]) -> None:
        self._footprint: partial[tuple[Access, ...]] | None = footprint
        self._accesses: Mapping[int, tuple[Grid, RowSelection]] = {}
        self._pieces: dict[object, Pieces] = {}

    def freeze(self) -> None:
        if self._footprint is not None:
            copies: _Copies = {}
            self._accesses = {
                order: (Grid.of(tensor), RowSelection(*[_copied_once(t, copies) for t in selection]))
                for order, (tensor, _, *selection) in enumerate(self._footprint())
                if selection[0] is not None
            }
            self._footprint = None

    def drop(self) -> None:
        self._footprint, self._accesses = None, {}

    def pieces(self, order: int) -> Pieces:
        self.freeze()
        assert self._accesses, CLOSED
        grid, selection = self._accesses[order]
        key = (grid, *map(id, selection))
        if key not in self._pieces:
            self._pieces[key] = grid.rows(selection)
        return self._pieces[key]


_Copies = dict[int, tuple[torch.Tensor, torch.Tensor]]  # tensors and their copies, by id of the former


def _copied_once(tensor: torch.Tensor | None, copies: _Copies) -> torch.Tensor | None:
    """The tensor's copy, made unless ``copies`` has it. Tensors that share no memory with the kernel's arguments are
    copied as well, since a test for that takes longer than the copy."""
    if tensor is None:
        return None
    made = copies.get(id(tensor))
    if made is None:
        made = copies[id(tensor)] = tensor, copied(tensor)
    return made[1]


def _accesses(declared: Sequence[Access], arguments: Sequence[Any]) -> Iterator[ArgumentAccess]:
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
