"""A decoder that computes whole blocks, in which every token attends to all of its block."""

from __future__ import annotations

import torch

from ..batch import ForwardBatch, ModelOutput
from ..kernels.rows import embedding
from .decoder import Decoder, each_token
from .weights import LayerWeights


class BlockDecoder(Decoder):
    """Every request of a batch has one block. The block's KV is stored before it is attended to, so that a forward of
    the known tokens leaves the KV that later blocks read."""

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        """The logits [T, vocab] of every token."""
        return ModelOutput(
            self.logits(self.layers(embedding(batch.input_ids, self.weights.embedding), batch))
        )

    def _dense(self, qkv: torch.Tensor, layer: LayerWeights, batch: ForwardBatch, index: int) -> torch.Tensor:
        stored = self._stored(qkv, layer, batch, index)
        return self._attended(*stored, each_token(batch, batch.seq_lens), self._req_to_token)
