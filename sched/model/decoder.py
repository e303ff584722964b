"""The decoder: nine kernels per layer, more with sparse attention, and no other device work.

It depends on requests only as rows of a ForwardBatch, and on the device only by the tensors that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Protocol

import torch

from ..batch import EncoderTokens, ForwardBatch, ForwardMode, LayerPart, ModelOutput
from ..kernels.attention import attention, decoder_pages, tree_attention
from ..kernels.dense import add_rms_norm, linear, rms_norm, rope_and_store_kv, silu_and_mul
from ..kernels.rows import embedding, extend_positions, last_tokens
from ..memory.pools import KVPool
from .config import ModelConfig
from .sparse import SparseAttention, Stored
from .weights import LayerWeights, Weights


class Model(Protocol):
    """Computes the logits of a batch. The caller disables gradients."""

    def forward(self, batch: ForwardBatch) -> ModelOutput: ...


def each_token(batch: ForwardBatch, seq_lens: torch.Tensor) -> ForwardBatch:
    """The batch with a row for each token, which attends to the first ``seq_lens`` [b] positions of its request."""
    if batch.extend_lens is None:
        return replace(batch, seq_lens=seq_lens)
    rows, lens = (
        by_row.repeat_interleave(batch.extend_lens, output_size=batch.num_tokens)
        for by_row in (batch.req_pool_indices, seq_lens)
    )
    return replace(batch, req_pool_indices=rows, seq_lens=lens, extend_lens=None, max_extend_len=1)


# An MLP that is shared with other ranks.
FeedForward = Callable[[torch.Tensor, LayerWeights, ForwardBatch], torch.Tensor]


@dataclass(eq=False)
class Decoder:
    """The layers of a model. Attention is dense unless ``sparse`` is given; the MLP is the rank's own unless ``mlp`` is
    given."""

    config: ModelConfig
    weights: Weights
    _: KW_ONLY
    kv: KVPool
    req_to_token: torch.Tensor
    sparse: SparseAttention | None = None
    mlp: FeedForward | None = None

    def __post_init__(self) -> None:
        self._mlp = self.mlp or self._own_mlp
        self._logits_dtype = torch.float64 if self.config.dtype == torch.float64 else torch.float32

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        """The logits [b, vocab] of each request's last token, or of every token in a verify: float32 (float64 for a
        float64 model). They follow from the last layers, and are empty after a part before."""
        if batch.mode.is_idle:
            return self._idle(batch)
        count = len(self.weights.layers)
        part = batch.part or LayerPart(0, count, count)
        before, residual = part.state or (None, embedding(batch.input_ids, self.weights.embedding))
        hidden = self.through(before, residual, batch, range(part.start, part.stop))
        if not part.is_last:
            part.state = hidden, residual
            return ModelOutput(hidden[:0])
        hidden = self.close(hidden, residual)
        captured = hidden if batch.capture_hidden else None
        scores = None if batch.prompt_targets is None else self._scores(hidden, batch.prompt_targets)
        if batch.extend_lens is not None and batch.mode is not ForwardMode.TARGET_VERIFY:
            hidden = last_tokens(hidden, batch.extend_lens)
        return ModelOutput(self.logits(hidden), hidden_states=captured, prompt_logprobs=scores)

    def _idle(self, batch: ForwardBatch) -> ModelOutput:
        """The forward of a batch without tokens: only the shared MLP is computed, for the other ranks."""
        empty = batch.positions.new_empty((0, self.config.hidden_size), dtype=self.config.dtype)
        if self.mlp is not None:
            for layer in self.weights.layers:
                self.mlp(empty, layer, batch)
        return ModelOutput(empty.new_empty((0, self.config.vocab_size), dtype=self._logits_dtype))

    def layers(self, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Run all layers on the residual stream [T, hidden], which is overwritten. Returns its final norm."""
        return self.close(self.through(None, residual, batch), residual)

    def through(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor,
        batch: ForwardBatch,
        layers: range | None = None,
    ) -> torch.Tensor:
        """Run ``layers``, by default all. ``hidden`` [T, hidden] is the output of the preceding layer, if there is one,
        and like the result has not been added to the residual stream yet."""
        eps = self.config.rms_norm_eps
        for index in range(len(self.weights.layers)) if layers is None else layers:
            layer = self.weights.layers[index]
            if hidden is None:
                hidden = rms_norm(residual, layer.input_norm, eps)
            else:
                hidden = add_rms_norm(hidden, residual, layer.input_norm, eps)
            hidden = self._attention(hidden, layer, batch, index)
            hidden = add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = self._mlp(hidden, layer, batch)
        assert hidden is not None, "there are layers"
        return hidden

    def close(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add the last layer's output to the residual stream and return its final norm."""
        return add_rms_norm(hidden, residual, self.weights.norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [n, vocab] of ``hidden`` [n, hidden] after the final norm."""
        return linear(hidden, self.weights.lm_head, None, self._logits_dtype)

    def _scores(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The log probabilities [T] of ``targets`` [T], each after its token, at temperature 1 without penalties."""
        logprobs = self.logits(hidden).double().log_softmax(1)
        return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1).float()

    def _attention(
        self, hidden: torch.Tensor, layer: LayerWeights, batch: ForwardBatch, index: int
    ) -> torch.Tensor:
        qkv = linear(hidden, layer.qkv, layer.qkv_bias, hidden.dtype)
        if self.sparse is not None:
            store = partial(self._stored, qkv, layer, batch, index)
            return self._linear(self.sparse(hidden, layer, batch, index, store), layer.o)
        return self._linear(self._dense(qkv, layer, batch, index), layer.o)

    def _dense(self, qkv: torch.Tensor, layer: LayerWeights, batch: ForwardBatch, index: int) -> torch.Tensor:
        stored = self._stored(qkv, layer, batch, index, batch.out_cache_loc)
        return self._attended(*stored, batch, self.req_to_token)

    def _stored(
        self, qkv: torch.Tensor, layer: LayerWeights, batch: ForwardBatch, index: int, slots: torch.Tensor
    ) -> Stored:
        k_cache, v_cache = self.kv.k_cache[index], self.kv.v_cache[index]
        q = rope_and_store_kv(
            qkv,
            batch.positions,
            self.weights.cos_sin,
            layer.q_norm,
            layer.k_norm,
            self.config.rms_norm_eps,
            slots,
            k_cache,
            v_cache,
        )
        return q, k_cache, v_cache

    def _attended(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: ForwardBatch,
        req_to_token: torch.Tensor,
    ) -> torch.Tensor:
        scale = self.config.head_dim**-0.5
        pages = (q, k_cache, v_cache, req_to_token, batch.req_pool_indices, batch.seq_lens)
        if batch.branches is None:
            return attention(*pages, batch.extend_lens, scale, batch.max_seq_len, batch.max_extend_len)
        return tree_attention(*pages, batch.branches, batch.branch_lens, scale, batch.max_seq_len)

    def _own_mlp(self, hidden: torch.Tensor, layer: LayerWeights, batch: ForwardBatch) -> torch.Tensor:  # noqa: ARG002
        return self._linear(silu_and_mul(self._linear(hidden, layer.gate_up)), layer.down)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, None, x.dtype)


class BlockDecoder(Decoder):
    """Every request of a batch has one block. The block's KV is stored before it is attended to, so that a forward of
    the known tokens leaves the KV that later blocks read."""

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        """The logits [T, vocab] of every token."""
        hidden = self.layers(embedding(batch.input_ids, self.weights.embedding), batch)
        return ModelOutput(self.logits(hidden))

    def _dense(self, qkv: torch.Tensor, layer: LayerWeights, batch: ForwardBatch, index: int) -> torch.Tensor:
        stored = self._stored(qkv, layer, batch, index, batch.out_cache_loc)
        return self._attended(*stored, each_token(batch, batch.seq_lens), self.req_to_token)


class Embedder(Decoder):
    """Returns each request's last hidden state [b, hidden], after the final norm, in place of logits.

    It does not pool over tokens, project, or scale to unit length: that would change no copy and no order."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class CrossDecoder(Decoder):
    """A decoder some of whose layers attend to the tokens of an encoder (mllama's and Whisper's shape).

    A request's tokens are its encoder's, then its decoder's, and all have KV slots in its row of the page table. The
    encoder is its tokens' embeddings: layers of its own would change no copy and no order of the scheduler. Upstream
    carries the number of encoder tokens in the batch and filters and merges it, a small kernel each; here the model
    keeps it by request slot.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, device = self.req_to_token.shape[0], self.req_to_token.device
        self._encoder_lens = torch.ones(rows, dtype=torch.int64, device=device)
        # What the layers of a forward attend to, with its page table: the decoder's tokens, and, for the cross layers,
        # each token all of its request's encoder tokens.
        self._attending: Sequence[tuple[ForwardBatch, torch.Tensor]] = ()

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        if not batch.mode.is_idle:
            if batch.encoder is not None:
                self._encode(batch, batch.encoder)
            self._attending = self._rows(batch)
        output = super().forward(batch)
        self._attending = ()
        return output

    def _encode(self, batch: ForwardBatch, encoder: EncoderTokens) -> None:
        """Store the KV of the encoder's tokens in the layers that attend to them."""
        self._encoder_lens[batch.req_pool_indices] = encoder.lens
        count = encoder.input_ids.shape[0]
        tokens = replace(batch, positions=extend_positions(encoder.lens, encoder.lens, count))
        embedded = embedding(encoder.input_ids, self.weights.embedding)
        for index in self.config.cross_layers:
            layer = self.weights.layers[index]
            hidden = rms_norm(embedded, layer.input_norm, self.config.rms_norm_eps)
            qkv = linear(hidden, layer.qkv, layer.qkv_bias, hidden.dtype)
            self._stored(qkv, layer, tokens, index, encoder.out_cache_loc)

    def _rows(self, batch: ForwardBatch) -> Sequence[tuple[ForwardBatch, torch.Tensor]]:
        pages, lens, encoder_lens = decoder_pages(
            self.req_to_token, batch.req_pool_indices, batch.seq_lens, self._encoder_lens, batch.max_seq_len
        )
        rows = torch.arange(batch.batch_size, device=pages.device)
        own = replace(batch, req_pool_indices=rows, seq_lens=lens)
        return (own, pages), (each_token(batch, encoder_lens), self.req_to_token)

    def _dense(self, qkv: torch.Tensor, layer: LayerWeights, batch: ForwardBatch, index: int) -> torch.Tensor:
        """A cross layer also stores KV of the decoder's tokens, which nothing reads."""
        stored = self._stored(qkv, layer, batch, index, batch.out_cache_loc)
        return self._attended(*stored, *self._attending[index in self.config.cross_layers])
