"""NumPy arrays of tensors in the host's memory: NumPy computes with few elements in a third of torch's time.

Making the array of a tensor takes longer than NumPy needs for few elements, so that tensors keep theirs.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Arrays without dimensions: NumPy computes with them in two thirds of the time that its scalars and Python's take.
ZERO, ONE = np.array(0, dtype=np.int64), np.array(1, dtype=np.int64)

Integer = TypeVar("Integer", bound=np.integer)
_NAME: Final = "_schedbench_arrays"


class _Arrays:
    """The arrays of one tensor's memory. A copy of the tensor, or what is unpickled from it, has none."""

    __slots__ = ("array", "starts", "words")
    array: NDArray[Any]
    starts: NDArray[np.int64]  # both are set when they are first asked for
    words: NDArray[np.uint64]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def array_of(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory as an array."""
    kept: _Arrays | None = getattr(tensor, _NAME, None)
    return tensor.numpy() if kept is None else kept.array


def kept_array(tensor: Tensor) -> NDArray[Any]:
    """``array_of`` a tensor that is read in many steps."""
    kept: _Arrays | None = getattr(tensor, _NAME, None)
    return _kept(tensor).array if kept is None else kept.array


def _kept(tensor: Tensor) -> _Arrays:
    kept: _Arrays | None = getattr(tensor, _NAME, None)
    if kept is None:  # an array of the tensor itself would keep it alive for good
        kept = _keep(tensor, tensor.detach().numpy())
    return kept


def _keep(tensor: Tensor, array: NDArray[Any]) -> _Arrays:
    kept = _Arrays()
    kept.array = array
    setattr(tensor, _NAME, kept)
    return kept


def kept_words(tensor: Tensor) -> NDArray[np.uint64]:
    """``kept_array`` of an int64 tensor, as unsigned integers."""
    kept = _kept(tensor)
    try:
        return kept.words
    except AttributeError:
        kept.words = kept.array.view(np.uint64)
        return kept.words


def row_starts(table: Tensor) -> NDArray[np.int64]:
    """Where each row of the ``table`` [rows, n] begins in its memory, which has no gaps."""
    kept = _kept(table)
    try:
        return kept.starts
    except AttributeError:
        rows, width = table.shape
        kept.starts = np.arange(rows, dtype=np.int64) * width
        return kept.starts


def clipped(x: NDArray[Integer], places: NDArray[np.integer]) -> NDArray[Integer]:
    """``x[places]``; a place out of range counts as the nearest in range. ``take`` alone needs twice the time, and
    with ``mode="wrap"`` a time that grows with how far a place is out of range."""
    try:
        found: NDArray[Integer] = x[places]
    except IndexError:
        found = x.take(places, mode="clip")
    return found


def tensor_of(array: NDArray[Any]) -> Tensor:
    """A tensor of the array's memory, for others that read it as an array."""
    tensor = torch.from_numpy(array)
    _keep(tensor, array)
    return tensor


def largest(lens: Tensor) -> int:
    """The largest of a batch's lengths; 0 without requests."""
    values = array_of(lens).tolist()
    return max(values) if values else 0  # an argument ``default`` takes longer than the maximum of few


def one_more(lens: Tensor) -> Tensor:
    """``lens + 1`` of int64 lengths."""
    return tensor_of(array_of(lens) + ONE)
