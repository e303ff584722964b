"""A pipeline stage: its neighbours, and the decoder of its layers, with proxies of the hidden state as in- and output.

    embedding | layers 0..k | -- hidden, residual --> | layers k+1..n | norm, head

Proxies are the input of the next layer: the last layer's output, and the residual stream, to which it is not added yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batch import ForwardBatch, ModelOutput
from ..kernels.dense import add_rms_norm, rms_norm
from ..kernels.rows import embedding, last_tokens
from ..model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage ``index`` of ``count``. ``async_depth`` is the number of microbatches in flight beyond one per stage. With
    ``skip_chunk_outputs`` the token of a batch that is a single unfinished prompt, which has no meaning, is not sent
    (#26148). ``smooth_chunks`` is the share by which chunk sizes follow latencies; None if all chunks have one size."""

    index: int
    count: int
    layers: range  # of the whole model
    async_depth: int = 0
    skip_chunk_outputs: bool = False
    smooth_chunks: float | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def following(self) -> int:
        return (self.index + 1) % self.count

    @property
    def preceding(self) -> int:
        return (self.index - 1) % self.count

    @property
    def microbatches(self) -> int:
        """Batches that take turns (upstream ``pp_loop_size``)."""
        return self.count + self.async_depth


def split_layers(layers: int, stages: int) -> list[range]:
    """Equal shares of the model. Remaining layers go to the stages from the last but one backwards, since the last
    stage has the head and the first one the embedding. Raises ValueError if there are fewer layers than stages."""
    if layers < stages:
        raise ValueError(f"{layers} layers cannot be split over {stages} stages")
    share, rest = divmod(layers, stages)
    sizes = [share + (stages - 1 - rest <= index < stages - 1) for index in range(stages)]
    starts = [sum(sizes[:index]) for index in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


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
