"""Which bytes of a storage an access touches: one span, or many pieces that are looked at only when it matters.

In a correct program no two footprints are ever compared, since order is asked first. So a footprint that
depends on values (rows by an index, slots by a page table) keeps the tensors it follows from, takes a copy
when one of them is about to change, and works out its pieces when it is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

Offsets = np.ndarray[Any, np.dtype[np.int64]]


class ByteSpan(NamedTuple):
    """Bytes [start, end)."""

    start: int
    end: int


class Pieces(NamedTuple):
    """Byte intervals in order of their starts; ``ends[k]`` is the furthest end of the first k + 1."""

    starts: Offsets
    ends: Offsets

    @classmethod
    def of(cls, starts: Offsets, ends: Offsets) -> Pieces:
        filled = ends > starts  # an interval of nothing meets nothing
        starts, ends = starts[filled], ends[filled]
        order = np.argsort(starts, kind="stable")
        return cls(starts[order], np.maximum.accumulate(ends[order]))


class FootprintSource(Protocol):
    """What pieces follow from."""

    def freeze(self) -> None:
        """The values it refers to are about to change: keep what they are now."""

    def pieces(self) -> Pieces: ...


class Scattered:
    """Pieces yet to be worked out."""

    __slots__ = ("__weakref__", "_pieces", "_source")

    def __init__(self, source: FootprintSource) -> None:
        self._source: FootprintSource | None = source
        self._pieces: Pieces | None = None

    def freeze(self) -> None:
        if self._source is not None:
            self._source.freeze()

    def pieces(self) -> Pieces:
        if self._pieces is None:
            assert self._source is not None, "a footprint is asked for after its virtual GPU was closed"
            self._pieces, self._source = self._source.pieces(), None
        return self._pieces

    def drop(self) -> None:
        """Forget the tensors it follows from."""
        self._source = None


Footprint = ByteSpan | Scattered


def meet(a: Footprint, b: Footprint) -> bool:
    """Whether some byte belongs to both."""
    if type(a) is ByteSpan and type(b) is ByteSpan:
        return a.start < b.end and b.start < a.end
    ours, theirs = _pieces(a), _pieces(b)
    if not len(ours.starts) or not len(theirs.starts):
        return False
    # The first of theirs that ends behind our start is the only one that need be looked at.
    first = np.searchsorted(theirs.ends, ours.starts, side="right")
    inside = first < len(theirs.starts)
    return bool((theirs.starts[first[inside]] < ours.ends[inside]).any())


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Its values as they are now, on the host."""
    return tensor.to("cpu", copy=True)


def span(tensor: torch.Tensor) -> ByteSpan:
    """From a tensor's first byte to its last; holes of a strided view are counted in."""
    item, start = tensor.itemsize, int(tensor.storage_offset())
    if tensor.is_contiguous():
        return ByteSpan(start * item, (start + tensor.numel()) * item)
    return ByteSpan(start * item, (start + _reach(tensor.size(), tensor.stride())) * item)


class RowSelection(NamedTuple):
    """Which rows, and how much of each (see ``Access``)."""

    rows: torch.Tensor | None
    lens: torch.Tensor | None
    counts: torch.Tensor | None

    def chosen(self) -> torch.Tensor:
        """[k] indices along the first dimension."""
        assert self.rows is not None
        if self.counts is None:
            return self.rows
        return self.rows[torch.arange(self.rows.shape[1]) < self.counts.unsqueeze(1)]


class Grid(NamedTuple):
    """A tensor's geometry without the tensor."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    item: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Grid:
        return cls(int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride(), tensor.itemsize)

    def at(self, indices: Sequence[torch.Tensor]) -> Pieces:
        """What ``tensor[i, j, ...]`` touches: indices of the first dimensions, broadcast together."""
        place: Offsets = np.full((), self.offset, np.int64)
        for index, size, stride in zip(indices, self.size, self.stride, strict=False):
            values = index.numpy().astype(np.int64)
            place = place + np.where(values < 0, values + size, values) * stride
        taken = len(indices)
        starts = np.ravel(place) * self.item
        return Pieces.of(starts, starts + _reach(self.size[taken:], self.stride[taken:]) * self.item)

    def rows(self, lines: RowSelection) -> Pieces:
        """Rows along the first dimension."""
        rows, lens = lines.chosen(), lines.lens
        if lens is None:
            return self.at([rows])
        starts = (self.offset + rows.numpy().astype(np.int64) * self.stride[0]) * self.item
        return Pieces.of(starts, starts + lens.numpy().astype(np.int64) * self.stride[1] * self.item)


class Indexed:
    """``tensor[i, j, ...]``, of a tensor of that geometry."""

    def __init__(self, grid: Grid, indices: Sequence[torch.Tensor]) -> None:
        self._grid = grid
        self._indices = indices

    def freeze(self) -> None:
        self._indices = [copied(index) for index in self._indices]

    def pieces(self) -> Pieces:
        return self._grid.at(self._indices)


def _reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one of that geometry, both included."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def _pieces(footprint: Footprint) -> Pieces:
    if isinstance(footprint, Scattered):
        return footprint.pieces()
    return Pieces(np.array([footprint.start], np.int64), np.array([footprint.end], np.int64))
