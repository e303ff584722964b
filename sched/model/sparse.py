"""Attention to selected tokens: the indexer's keys, the selection, and the location of the selected KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..batch import ForwardBatch
from ..kernels.dense import linear
from ..kernels.sparse import (
    index_and_store,
    page_lookup,
    select_simulated,
    select_top_k,
    sparse_attention,
    sparse_extend,
)
from ..memory.pools import IndexPool
from .config import Indexer, ModelConfig
from .weights import LayerWeights

Stored = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The queries of a forward's tokens, and both caches of a layer, in which their keys and values are stored."""


class KVLocator(Protocol):
    """Maps slots of the page table to device slots."""

    @property
    def mapping(self) -> torch.Tensor | None:
        """Device slots [slots] int64; None if they equal the page table's slots."""

    def write_slots(self, batch: ForwardBatch) -> torch.Tensor:
        """Device slots [T] int64 that the batch's new tokens are written to."""

    def read_slots(self, layer: int, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Device slots [b, k] int32 of a decode's selected ``positions`` [b, k] int32. Later work of the current stream
        finds the layer's KV in them."""


class PageTableLocator:
    """The locator of an engine whose KV is in the slots of the page table."""

    mapping = None

    def __init__(self, req_to_token: torch.Tensor) -> None:
        self._req_to_token = req_to_token

    def write_slots(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.out_cache_loc

    def read_slots(self, layer: int, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:  # noqa: ARG002
        return page_lookup(positions, self._req_to_token, batch.req_pool_indices)


@dataclass(slots=True, eq=False)
class SparseAttention:
    """Computes a layer's attention from its normalised hidden state, without the output projection.

    ``reuse`` is the share of a step's selected tokens that the previous step selected too, if nothing is scored.
    """

    config: ModelConfig
    indexer: Indexer
    index: IndexPool
    req_to_token: torch.Tensor
    locator: KVLocator
    reuse: float | None
    # Of the current forward:
    _write_slots: torch.Tensor | None = None  # where all layers write
    _selected: torch.Tensor | None = None  # positions selected last

    def __call__(
        self,
        hidden: torch.Tensor,
        layer: LayerWeights,
        batch: ForwardBatch,
        index: int,
        store: Callable[[torch.Tensor], Stored],
    ) -> torch.Tensor:
        """[T, heads · d]. ``store`` writes the layer's KV to the given slots, the same ones in all layers of a
        forward."""
        if index == 0:
            self._write_slots = self.locator.write_slots(batch)
        assert self._write_slots is not None
        projected = linear(hidden, layer.indexer, None, hidden.dtype)
        index_q, weights = index_and_store(
            projected, batch.out_cache_loc, self.index.k_cache[index], self.indexer.heads
        )
        stored = store(self._write_slots)
        attend = self._decode if batch.extend_lens is None else self._extend
        return attend(stored, index_q, weights, batch, index)

    def _decode(
        self, stored: Stored, index_q: torch.Tensor, weights: torch.Tensor, batch: ForwardBatch, index: int
    ) -> torch.Tensor:
        scored = (
            index_q,
            weights,
            self.index.k_cache[index],
            self.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            self.indexer.top_k,
        )
        if index and self.reuse is not None:
            # This scores nothing: the first layer's draw is used by all layers.
            select_top_k(*scored, batch.max_seq_len)
        elif self.reuse is not None:
            self._selected = select_simulated(*scored, self.reuse)
        else:
            self._selected = select_top_k(*scored, batch.max_seq_len)
        positions = self._selected
        assert positions is not None
        locations = self.locator.read_slots(index, positions, batch)
        return sparse_attention(*stored, locations, batch.seq_lens, self.config.head_dim**-0.5)

    def _extend(
        self, stored: Stored, index_q: torch.Tensor, weights: torch.Tensor, batch: ForwardBatch, index: int
    ) -> torch.Tensor:
        return sparse_extend(
            *stored,
            index_q,
            weights,
            self.index.k_cache[index],
            self.req_to_token,
            self.locator.mapping,
            batch.req_pool_indices,
            batch.positions,
            batch.seq_lens,
            batch.extend_lens,
            self.config.head_dim**-0.5,
            self.indexer.top_k,
            batch.max_seq_len,
        )
