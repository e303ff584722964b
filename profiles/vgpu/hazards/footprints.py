"""The bytes of a storage that an access touches: one span, or pieces that are computed only when they are compared.

In a correct program no two footprints are ever compared, since the checker compares the order first. A footprint that
depends on values (rows by an index, slots by a page table) therefore keeps the tensors that it follows from, copies
them when one of them is about to change, and computes its pieces when it is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ....sched.kernels.arrays import kept_array
from ...platform.machine import StorageAccess

Offsets = np.ndarray[Any, np.dtype[np.int64]]


class ByteSpan(NamedTuple):
    """Bytes [start, end)."""

    start: int
    end: int

    def pieces(self) -> Pieces:
        return Pieces(np.array([self.start], np.int64), np.array([self.end], np.int64))


class StridedSpan(NamedTuple):
    """``length`` bytes at every place within [start, end) that ``steps`` lead to: a count and a distance in bytes for
    each dimension."""

    start: int
    end: int
    length: int
    steps: tuple[tuple[int, int], ...]

    def pieces(self) -> Pieces:
        starts = np.array([self.start], np.int64)
        for count, step in self.steps:
            starts = np.add.outer(starts, np.arange(count, dtype=np.int64) * step).ravel()
        return Pieces.of(starts, starts + self.length)


class Pieces(NamedTuple):
    """Byte intervals sorted by start; ``ends[k]`` is the largest end of the first k + 1 intervals."""

    starts: Offsets
    ends: Offsets

    @classmethod
    def of(cls, starts: Offsets, ends: Offsets) -> Pieces:
        filled = ends > starts  # empty intervals overlap nothing
        starts, ends = starts[filled], ends[filled]
        order = np.argsort(starts, kind="stable")
        return cls(starts[order], np.maximum.accumulate(ends[order]))


class Scattered(NamedTuple):
    """Pieces that are computed on demand."""

    pieces: Callable[[], Pieces]


Span = ByteSpan | StridedSpan
Footprint = Span | Scattered


def meet(a: Footprint, b: Footprint) -> bool:
    """Whether the two have a byte in common."""
    if type(a) is ByteSpan and type(b) is ByteSpan:
        return a.start < b.end and b.start < a.end
    ours, theirs = a.pieces(), b.pieces()
    if not len(ours.starts) or not len(theirs.starts):
        return False
    # Only the first of theirs that ends after our start has to be compared.
    first = np.searchsorted(theirs.ends, ours.starts, side="right")
    inside = first < len(theirs.starts)
    return bool((theirs.starts[first[inside]] < ours.ends[inside]).any())


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor's present values on the host."""
    # The function, since calls of a tensor's methods are reported as the program's.
    return torch.clone(tensor) if tensor.is_cpu else tensor.to("cpu")


def entries(table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """A copy of the first entries of those rows of the table, as many of each as of the longest of them."""
    if not table.is_cpu:
        return copied(table[:, : max(lens.tolist(), default=0)].index_select(0, rows))
    longest = max(kept_array(lens).tolist(), default=0)  # NumPy needs less than half of torch's time
    return torch.from_numpy(kept_array(table)[kept_array(rows), :longest])


def span(tensor: torch.Tensor) -> Span:
    """The tensor's bytes, without the gaps of a strided view."""
    item = tensor.itemsize
    start = int(tensor.storage_offset()) * item
    if tensor.is_contiguous():
        return ByteSpan(start, start + tensor.nbytes)
    length, steps = _folded(tensor.size(), tensor.stride())
    end = start + (length + sum((count - 1) * step for count, step in steps)) * item
    if not steps:
        return ByteSpan(start, end)
    return StridedSpan(start, end, length * item, tuple((count, step * item) for count, step in steps))


def joined(footprints: Collection[Footprint]) -> Footprint:
    """All bytes of the footprints."""
    if len(footprints) == 1:
        return next(iter(footprints))
    pieces = [footprint.pieces() for footprint in footprints]
    starts, ends = Pieces.of(*map(np.concatenate, zip(*pieces, strict=True)))
    apart = starts[1:] > ends[:-1]
    if not apart.any():
        return ByteSpan(int(starts[0]), int(ends[-1])) if len(starts) else ByteSpan(0, 0)
    return Scattered(partial(Pieces, starts[np.append(True, apart)], ends[np.append(apart, True)]))


Selection = Sequence[torch.Tensor | None]


class Grid(NamedTuple):
    """A tensor's geometry: offset, sizes and strides in elements, ``item`` in bytes."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    item: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Grid:
        return cls(int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride(), tensor.itemsize)

    def at(self, indices: Selection) -> Pieces:
        """The bytes of ``tensor[i, j, ...]``, by indices of the first dimensions, which are broadcast together; None
        selects all of a dimension."""
        place: Offsets = np.full((), self.offset, np.int64)
        whole: Offsets = np.zeros((), np.int64)
        for index, size, stride in zip(indices, self.size, self.stride, strict=False):
            if index is None:
                whole = np.add.outer(whole, np.arange(size, dtype=np.int64) * stride)
                continue
            values = index.numpy().astype(np.int64)
            place = place + np.where(values < 0, values + size, values) * stride
        length, steps = _folded(self.size[len(indices) :], self.stride[len(indices) :])
        for count, step in steps:
            whole = np.add.outer(whole, np.arange(count, dtype=np.int64) * step)
        starts = np.ravel(np.add.outer(whole, place)) * self.item
        return Pieces.of(starts, starts + length * self.item)

    def rows(self, selection: Selection) -> Pieces:
        """The bytes of rows along the first dimension. Of each row only the first entries count if there are ``lens``;
        of each line of ``rows`` only the first indices if there are ``counts``."""
        rows, lens, counts = selection
        assert rows is not None
        if counts is not None:
            rows = rows[torch.arange(rows.shape[1]) < counts.unsqueeze(1)]
        if lens is None:
            return self.at([rows])
        starts = (self.offset + rows.numpy().astype(np.int64) * self.stride[0]) * self.item
        return Pieces.of(starts, starts + lens.numpy().astype(np.int64) * self.stride[1] * self.item)


def visited(access: StorageAccess) -> Footprint:
    """The footprint of an access that has taken place."""
    if len(access.starts) == 1:
        return ByteSpan(int(access.starts[0]), int(access.ends[0]))
    return Scattered(partial(Pieces, access.starts, access.ends))


class Selections(NamedTuple):
    """The geometry of what accesses touch, with keys of what selects parts of it, by numbers of the accesses; and what
    makes a tensor whose values stay, by key."""

    accesses: Mapping[int, tuple[Grid, tuple[object, ...]]]
    values: Mapping[Any, Callable[[], torch.Tensor]]


class ValueSource:
    """What the footprints of accesses follow from: values, read when the first of the footprints is compared or the
    values are about to change. ``select`` is the method of ``Grid`` that takes the selections. Accesses to the same
    rows of tensors of one geometry, such as keys and values, share their pieces."""

    def __init__(
        self, select: Callable[[Grid, Selection], Pieces], present: Callable[[], Selections]
    ) -> None:
        self._select = select
        self._present: Callable[[], Selections] | None = present
        self._accesses: Mapping[int, tuple[Grid, tuple[object, ...]]] = {}
        self._values: dict[object, torch.Tensor] = {}
        self._pieces: dict[object, Pieces] = {}

    def freeze(self) -> None:
        """Read the values, which are about to change."""
        if self._present is not None:
            (self._accesses, values), self._present = self._present(), None
            self._values = {key: value() for key, value in values.items()}

    def drop(self) -> None:
        """Release the values, which are not read any more."""
        self._present, self._accesses, self._values = None, {}, {}

    def pieces(self, order: int) -> Pieces:
        self.freeze()
        assert self._accesses, "a footprint is read after its virtual GPU was closed"
        selected = grid, keys = self._accesses[order]
        if selected not in self._pieces:
            self._pieces[selected] = self._select(grid, [self._values.get(key) for key in keys])
        return self._pieces[selected]


def _folded(size: Sequence[int], stride: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
    """How many elements of that geometry follow each other without a gap, and by which counts and distances such rows
    are repeated."""
    length, steps = int(0 not in size), list[tuple[int, int]]()
    for step, count in sorted(zip(stride, size, strict=True)):
        if step <= length and not steps:
            length += (count - 1) * step
        elif count > 1:
            steps.append((count, step))
    return (length, steps) if length else (0, [])
