"""Arrays that tensors keep of their own memory."""

from __future__ import annotations

import pickle
import weakref
from copy import deepcopy

import numpy as np
import pytest
import torch

from schedbench.sched.kernels.arrays import (
    array_of,
    kept_array,
    kept_words,
    largest,
    one_more,
    row_starts,
    tensor_of,
)


def test_a_kept_array_is_the_tensors_memory_and_is_made_once() -> None:
    tensor = torch.tensor([3, -1])
    array = kept_array(tensor)
    tensor.add_(1)
    assert array.tolist() == [4, 0]
    assert kept_array(tensor) is array and array_of(tensor) is array
    assert kept_words(tensor) is kept_words(tensor) and kept_words(tensor).dtype == np.uint64


def test_an_array_that_is_read_once_is_not_kept() -> None:
    tensor = torch.tensor([3])
    assert array_of(tensor) is not array_of(tensor)


def test_a_tensor_of_an_array_keeps_it() -> None:
    array = np.array([1, 2])
    tensor = tensor_of(array)
    assert array_of(tensor) is array
    tensor[0] = 7
    assert array.tolist() == [7, 2]


@pytest.mark.parametrize("make", [lambda: torch.arange(3), lambda: tensor_of(np.arange(3))])
def test_a_kept_array_keeps_no_tensor_alive(make) -> None:
    tensor = make()
    kept_array(tensor)
    left = weakref.ref(tensor)
    del tensor
    assert left() is None


@pytest.mark.parametrize("copied", [deepcopy, lambda tensor: pickle.loads(pickle.dumps(tensor))])
def test_a_copy_has_an_array_of_its_own(copied) -> None:
    tensor = tensor_of(np.array([1, 2]))
    other = copied(tensor)
    kept_array(other)[0] = 5
    assert other.tolist() == [5, 2] and tensor.tolist() == [1, 2]


def test_lengths_and_rows() -> None:
    assert row_starts(torch.zeros(3, 4, dtype=torch.int32)).tolist() == [0, 4, 8]
    assert largest(torch.tensor([2, 9, 4])) == 9 and largest(torch.empty(0, dtype=torch.int64)) == 0
    assert one_more(torch.tensor([2, 9])).tolist() == [3, 10]
