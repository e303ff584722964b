"""KV that arrives on the host and goes on to the device stays unchanged."""

from __future__ import annotations

import torch

from schedbench.sched.kernels.hot_buffers import NOWHERE, empty_buffer, land_on_host, preload
from schedbench.sched.kernels.transfer import gather_kv, scatter_kv

LAYERS, SLOTS, HEADS, DIM = 3, 10, 2, 4
FROM, HOST, TO = torch.tensor([7, 1, 4]), torch.tensor([2, 9, 5]), torch.tensor([3, 8, 6])


def caches(fill: torch.Generator | None) -> list[torch.Tensor]:
    shape = SLOTS, HEADS, DIM
    return [torch.zeros(shape) if fill is None else torch.randn(shape, generator=fill) for _ in range(LAYERS)]


def test_kv_goes_to_the_host_and_on() -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = caches(generator), caches(generator)
    new_k, new_v = caches(None), caches(None)
    host = torch.zeros(SLOTS, LAYERS, 2, HEADS, DIM)
    land_on_host(host, HOST, gather_kv([*k, *v], FROM))
    preload(new_k, new_v, host, TO, HOST)
    for before, after in zip((*k, *v), (*new_k, *new_v), strict=True):
        assert torch.equal(after[TO], before[FROM])
        assert int(after.ne(0).flatten(1).any(1).sum()) == len(TO)


def test_rows_of_every_layer() -> None:
    source = [torch.randn(SLOTS, DIM) for _ in range(LAYERS)]
    target = [torch.zeros(SLOTS, DIM) for _ in range(LAYERS)]
    scatter_kv(target, TO, gather_kv(source, FROM))
    assert all(torch.equal(after[TO], before[FROM]) for before, after in zip(source, target, strict=True))


def test_an_emptied_buffer_holds_no_position() -> None:
    tokens = [torch.arange(6, dtype=torch.int32).expand(4, 6).clone() for _ in range(LAYERS)]
    empty_buffer(tokens, 2)
    assert all(table[2].eq(NOWHERE).all() and not table[[0, 1, 3]].eq(NOWHERE).any() for table in tokens)
