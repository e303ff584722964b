"""One stage of a decoder: its layers, with proxies of the hidden state as input and output.

    embedding | layers 0..k | -- hidden, residual --> | layers k+1..n | norm, head

Proxies are the input of the next layer: the last layer's output, and the residual stream, to which it is not added yet.
"""

from __future__ import annotations

import torch

from ..batch import ForwardBatch, ModelOutput
from ..kernels.norm import add_rms_norm, rms_norm
from ..kernels.rows import embedding, last_tokens
from ..model.decoder import Decoder
from .stage import Stage


class StageDecoder:
    """``decoder`` has only the stage's layers."""

    def __init__(self, decoder: Decoder, stage: Stage) -> None:
        self._decoder = decoder
        self._stage = stage

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        """Logits on the last stage. On every other stage ``proxies`` for the next one, hidden and residual [T, hidden]
        each, and no logits."""
        hidden, residual = self._enter(batch)
        hidden = self._decoder.through(hidden, residual, batch)
        if not self._stage.is_last:
            return ModelOutput(hidden[:0], proxies=(hidden, residual))
        hidden = self._decoder.close(hidden, residual)
        if batch.extend_lens is not None:
            hidden = last_tokens(hidden, batch.extend_lens)
        return ModelOutput(self._decoder.logits(hidden))

    def _enter(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The first layer's normalised input, and the residual stream, which the layers overwrite."""
        weights, eps = self._decoder.weights, self._decoder.config.rms_norm_eps
        norm = weights.layers[0].input_norm
        if self._stage.is_first:
            residual: torch.Tensor = embedding(batch.input_ids, weights.embedding)
            return rms_norm(residual, norm, eps), residual
        hidden, residual = batch.proxies[:2]
        return add_rms_norm(hidden, residual, norm, eps), residual
