"""The shared MLP computes the same bits as an unsplit one, however the rows are spread over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue

import pytest
import torch

from schedbench.sched.batch import ForwardBatch, ForwardMode
from schedbench.sched.data_parallel.mlp import WIDTH, SharedMLP, most_ranks, sharded, split_columns
from schedbench.sched.data_parallel.sync import RankShare
from schedbench.sched.kernels.dense import linear, silu_and_mul
from schedbench.sched.model.config import PRESETS
from schedbench.sched.model.weights import Weights, seeded_weights

CPU = torch.device("cpu")


class QueueLinks:
    """Queues between threads: a tensor that is sent to a rank waits until that rank receives it."""

    def __init__(self, ranks: int) -> None:
        self._waiting = {
            (a, b): Queue[tuple[str, torch.Tensor]]() for a in range(ranks) for b in range(ranks)
        }

    def end(self, rank: int) -> QueueLink:
        return QueueLink(rank, self._waiting)


class QueueLink:
    def __init__(self, rank: int, waiting: dict[tuple[int, int], Queue[tuple[str, torch.Tensor]]]) -> None:
        self._rank = rank
        self._waiting = waiting

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for to, tensor in enumerate(tensors):
            self._waiting[self._rank, to].put((tag, tensor))
        came = [self._waiting[source, self._rank].get(timeout=30) for source in range(len(tensors))]
        assert {other for other, _ in came} == {tag}
        return [tensor for _, tensor in came]


def weights(preset: str, dtype: torch.dtype) -> Weights:
    return seeded_weights(
        replace(PRESETS[preset], dtype_name=str(dtype).removeprefix("torch.")), seed=3, device=CPU
    )


def rows_of(counts: tuple[int, ...]) -> ForwardBatch:
    empty = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        ForwardMode.DECODE, *(empty for _ in range(5)), max_seq_len=0, global_num_tokens=counts
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 0), (17, 1, 0), (0, 0, 5), (4, 33, 0, 2)])
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-deep", "tiny-qwen3"])
def test_the_shared_mlp_computes_the_bits_of_an_unsplit_one(
    preset: str, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    config, whole = PRESETS[preset], weights(preset, dtype)
    layer, ranks, wires = whole.layers[1], len(counts), QueueLinks(len(counts))
    hidden = torch.randn(sum(counts), config.hidden_size, generator=torch.Generator().manual_seed(1)).to(
        dtype
    )
    expected = linear(silu_and_mul(linear(hidden, layer.gate_up, None, dtype)), layer.down, None, dtype)

    def run(rank: int, rows: torch.Tensor) -> torch.Tensor:
        share = RankShare(rank, ranks)
        mlp = SharedMLP(wires.end(rank), config, share)  # type: ignore[arg-type]
        return mlp(rows, sharded(whole, config, share).layers[1], rows_of(counts))

    with ThreadPoolExecutor(ranks) as threads:
        parts = list(threads.map(run, range(ranks), hidden.split(counts)))
    assert [len(part) for part in parts] == list(counts)
    assert torch.equal(torch.cat(parts), expected)


def test_columns_are_split_once_and_in_whole_blocks() -> None:
    for width, ranks in ((512, 3), (200, 4), (96, 6), (64, 4)):
        parts = split_columns(width, ranks)
        assert [column for part in parts for column in part] == list(range(width))
        assert all(part.start % WIDTH == 0 and len(part) for part in parts)


def test_a_rank_has_its_share_of_the_weights() -> None:
    config, whole = PRESETS["tiny-llama"], weights("tiny-llama", torch.float32)
    parts = [sharded(whole, config, RankShare(rank, 4)).layers[0] for rank in range(4)]
    assert {tuple(part.gate_up.shape) for part in parts} == {(128, 128)}
    assert {tuple(part.down.shape) for part in parts} == {(256, 32)}
    assert all(torch.equal(part.qkv, whole.layers[0].qkv) for part in parts)
    assert most_ranks(config) == 8
