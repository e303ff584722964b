from __future__ import annotations

import torch

from schedbench.sched.memory.pools import ReqToTokenPool


def test_rows_come_from_the_front_and_return_to_the_back() -> None:
    pool = ReqToTokenPool(3, 8, device=torch.device("cpu"))

    assert pool.alloc(2) == [1, 2]
    pool.free(1)
    assert pool.alloc(2) == [3, 1]
    assert pool.alloc(1) is None
    assert pool.alloc(0) == []


def test_a_refusal_takes_nothing() -> None:
    pool = ReqToTokenPool(3, 8, device=torch.device("cpu"))

    assert pool.alloc(4) is None
    assert pool.available_size() == 3


def test_the_table_starts_at_zero_with_a_padding_row() -> None:
    pool = ReqToTokenPool(3, 8, device=torch.device("cpu"))

    assert pool.req_to_token.shape == (4, 8)
    assert pool.req_to_token.dtype == torch.int32
    assert not pool.req_to_token.any()
