"""Attention to chosen tokens: the indexer's keys, the choice, and KV wherever it lies."""

from __future__ import annotations

from typing import Protocol

import torch

from ..batch import ForwardBatch
from ..kernels.indexer import index_and_store, select_by_lot, select_top_k
from ..kernels.linear import linear
from ..kernels.rope import rope_and_store_kv
from ..kernels.sparse import page_lookup, sparse_attention, sparse_extend
from ..memory.index import IndexPool
from ..memory.kv import KVPool
from .config import Indexer, ModelConfig
from .weights import LayerWeights, Weights


class KVLocator(Protocol):
    """Where the KV of the page table's slots lies on the device."""

    @property
    def mapping(self) -> torch.Tensor | None:
        """[slots] int64 device slots; None where they are the page table's own."""

    def written(self, batch: ForwardBatch) -> torch.Tensor:
        """Device slots [T] int64 that the batch's new tokens are written to."""

    def located(self, layer: int, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Device slots [b, k] int32 of a decode's chosen ``positions`` [b, k] int32, all of which hold the layer's KV
        by the time the current stream gets there."""


class PageTableLocator:
    """All KV in the slots of the page table."""

    mapping = None

    def __init__(self, req_to_token: torch.Tensor) -> None:
        self._req_to_token = req_to_token

    def written(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.out_cache_loc

    def located(self, layer: int, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:  # noqa: ARG002
        slots: torch.Tensor = page_lookup(positions, self._req_to_token, batch.req_pool_indices)
        return slots


class SparseAttention:
    """From the normalised hidden state to what the layer attended to, before its output projection.

    ``reuse`` is the share of a step's chosen tokens that were chosen in the step before, where nothing is scored.
    """

    def __init__(
        self,
        config: ModelConfig,
        indexer: Indexer,
        weights: Weights,
        *,
        kv: KVPool,
        index: IndexPool,
        req_to_token: torch.Tensor,
        residence: KVLocator,
        reuse: float | None,
    ) -> None:
        self._config = config
        self._indexer = indexer
        self._cos_sin = weights.cos_sin
        self._kv = kv
        self._index = index
        self._req_to_token = req_to_token
        self._residence = residence
        self._reuse = reuse
        # Of the forward under way:
        self._written: torch.Tensor | None = None  # where all layers write
        self._chosen: torch.Tensor | None = None  # positions of the last choice

    def __call__(
        self, hidden: torch.Tensor, qkv: torch.Tensor, layer: LayerWeights, batch: ForwardBatch, index: int
    ) -> torch.Tensor:
        """[T, heads · d]; all layers of a forward write to the same slots."""
        if index == 0:
            self._written = self._residence.written(batch)
        config, indexer = self._config, self._indexer
        projected = linear(hidden, layer.indexer, None, config.dtype)
        index_q, weights = index_and_store(
            projected, batch.out_cache_loc, self._index.k_cache[index], indexer.heads
        )
        q = rope_and_store_kv(
            qkv,
            batch.positions,
            self._cos_sin,
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
            self._written,
            self._kv.k_cache[index],
            self._kv.v_cache[index],
        )
        attend = self._decode if batch.extend_lens is None else self._extend
        return attend(q, index_q, weights, batch, index)

    def _decode(
        self, q: torch.Tensor, index_q: torch.Tensor, weights: torch.Tensor, batch: ForwardBatch, index: int
    ) -> torch.Tensor:
        scored = (
            index_q,
            weights,
            self._index.k_cache[index],
            self._req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            self._indexer.top_k,
        )
        if index and self._reuse is not None:
            select_top_k(
                *scored, batch.max_seq_len
            )  # scores nothing; what the first layer drew stands for all
        elif self._reuse is not None:
            self._chosen = select_by_lot(*scored, self._reuse)
        else:
            self._chosen = select_top_k(*scored, batch.max_seq_len)
        positions = self._chosen
        assert positions is not None
        locations = self._residence.located(index, positions, batch)
        k_cache, v_cache = self._kv.k_cache[index], self._kv.v_cache[index]
        scale = self._config.head_dim**-0.5
        attended: torch.Tensor = sparse_attention(q, k_cache, v_cache, locations, batch.seq_lens, scale)
        return attended

    def _extend(
        self, q: torch.Tensor, index_q: torch.Tensor, weights: torch.Tensor, batch: ForwardBatch, index: int
    ) -> torch.Tensor:
        attended: torch.Tensor = sparse_extend(
            q,
            self._kv.k_cache[index],
            self._kv.v_cache[index],
            index_q,
            weights,
            self._index.k_cache[index],
            self._req_to_token,
            self._residence.mapping,
            batch.req_pool_indices,
            batch.positions,
            batch.seq_lens,
            batch.extend_lens,
            self._config.head_dim**-0.5,
            self._indexer.top_k,
            batch.max_seq_len,
        )
        return attended
