"""A decoder some of whose layers attend to the tokens of an encoder (mllama's and Whisper's shape).

A request's tokens are its encoder's, then its decoder's, and all have KV slots in its row of the page table. The
encoder is its tokens' embeddings: layers of its own would change no copy and no order of the scheduler. Upstream
carries the number of encoder tokens in the batch and filters and merges it, a small kernel each; here the model keeps
it by request slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..batch import EncoderTokens, ForwardBatch, ModelOutput
from ..kernels.cross import decoder_pages
from ..kernels.dense import linear, rms_norm
from ..kernels.rows import embedding, extend_positions
from ..memory.pools import KVPool
from .config import ModelConfig
from .decoder import Decoder, FeedForward, each_token
from .sparse import SparseAttention
from .weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class _Attended:
    """What the layers of one forward attend to: ``own`` the decoder's tokens, on pages of their own, and ``encoder``
    for each token all of its request's encoder tokens."""

    own: ForwardBatch
    pages: torch.Tensor
    encoder: ForwardBatch


class CrossDecoder(Decoder):
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        kv: KVPool,
        req_to_token: torch.Tensor,
        sparse: SparseAttention | None = None,
        mlp: FeedForward | None = None,
    ) -> None:
        super().__init__(config, weights, kv=kv, req_to_token=req_to_token, sparse=sparse, mlp=mlp)
        self._encoder_lens = torch.ones(req_to_token.shape[0], dtype=torch.int64, device=req_to_token.device)
        self._attending: _Attended | None = None

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        if not batch.mode.is_idle:
            if batch.encoder is not None:
                self._encode(batch, batch.encoder)
            self._attending = self._rows(batch)
        output = super().forward(batch)
        self._attending = None
        return output

    def _encode(self, batch: ForwardBatch, encoder: EncoderTokens) -> None:
        """Store the KV of the encoder's tokens in the layers that attend to them."""
        self._encoder_lens[batch.req_pool_indices] = encoder.lens
        count = encoder.input_ids.shape[0]
        tokens = replace(
            batch,
            positions=extend_positions(encoder.lens, encoder.lens, count),
            out_cache_loc=encoder.out_cache_loc,
        )
        embedded = embedding(encoder.input_ids, self.weights.embedding)
        for index in self.config.cross_layers:
            layer = self.weights.layers[index]
            hidden = rms_norm(embedded, layer.input_norm, self.config.rms_norm_eps)
            self._stored(linear(hidden, layer.qkv, layer.qkv_bias, self.config.dtype), layer, tokens, index)

    def _rows(self, batch: ForwardBatch) -> _Attended:
        pages, lens, encoder_lens = decoder_pages(
            self._req_to_token, batch.req_pool_indices, batch.seq_lens, self._encoder_lens, batch.max_seq_len
        )
        rows = torch.arange(batch.batch_size, device=pages.device)
        return _Attended(
            own=replace(batch, req_pool_indices=rows, seq_lens=lens),
            pages=pages,
            encoder=each_token(batch, encoder_lens),
        )

    def _dense(self, qkv: torch.Tensor, layer: LayerWeights, batch: ForwardBatch, index: int) -> torch.Tensor:
        """A cross layer also stores KV of the decoder's tokens, which nothing reads."""
        q, k_cache, v_cache = self._stored(qkv, layer, batch, index)
        attended = self._attending
        assert attended is not None
        if index in self.config.cross_layers:
            return self._attended(q, k_cache, v_cache, attended.encoder, self._req_to_token)
        return self._attended(q, k_cache, v_cache, attended.own, attended.pages)
