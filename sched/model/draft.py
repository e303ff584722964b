"""The draft model of EAGLE (arXiv 2401.15077): one decoder layer over a token's embedding and the hidden state of the
position before it. Embedding and head are the target's; its KV is in the target's slots, in a pool of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from ..batch import ForwardBatch
from ..kernels.dense import linear
from ..kernels.rows import embedding
from ..memory.pools import KVPool
from .checkpoint import CheckpointError, Tensors, parts_of, read_config
from .config import ModelConfig
from .decoder import Decoder
from .weights import Shape, Weights, layer_weights

# The weight of the hidden state in a derived draft, relative to the embedding. The target's first layer does not use
# the hidden state; with weight 0 a wrong hidden state would change no token.
HIDDEN_SHARE = 0.02


def derived_weights(config: ModelConfig, target: Weights) -> Weights:
    """A draft that is the target's first layer, which guesses well if deeper layers contribute little. A draft has the
    target's embedding, head and angles."""
    identity = torch.eye(config.hidden_size, dtype=config.dtype)
    # A seeded embedding's norm is 1, a hidden state's that of a vector of ones.
    share = HIDDEN_SHARE / math.sqrt(config.hidden_size)
    fc = torch.cat([identity, share * identity]).to(target.embedding.device)
    return replace(target, layers=target.layers[:1], fc=fc)


def empty_draft_weights(config: ModelConfig, target: Weights) -> Weights:
    """Storage alone, for a device that skips floating-point work."""
    device = target.embedding.device
    fc = torch.empty((2 * config.hidden_size, config.hidden_size), dtype=config.dtype, device=device)
    return replace(target, layers=target.layers[:1], fc=fc)


def read_draft_config(directory: Path, target: ModelConfig) -> ModelConfig:
    """The draft in ``directory``: one layer, as wide as the target. Raises CheckpointError."""
    config = read_config(directory, dtype_name=target.dtype_name)
    for key in ("hidden_size", "vocab_size"):
        if getattr(config, key) != getattr(target, key):
            wanted, found = getattr(target, key), getattr(config, key)
            raise CheckpointError(directory / "config.json", f"{key}: the target has {wanted}, got {found}")
    if config.num_layers != 1:
        raise CheckpointError(
            directory / "config.json", f"num_hidden_layers: a draft has one layer, got {config.num_layers}"
        )
    return config


def load_draft_weights(directory: Path, config: ModelConfig, target: Weights) -> Weights:
    """``fc.weight`` [hidden, 2 · hidden], ``norm.weight`` and the tensors of ``layers.0``, named as in a complete
    model but without ``model.``. The rotary angles are the target's, as the positions are. Raises CheckpointError."""
    tensors, device = Tensors(directory), target.embedding.device

    def source(name: str, shape: Shape) -> torch.Tensor:
        parts = ("fc.weight",) if name == "fc" else parts_of(name)
        whole = tensors.joined(tuple(part.removeprefix("model.") for part in parts), shape[::-1])
        return whole.t().to(config.dtype).contiguous().to(device)

    hidden = config.hidden_size
    fc, norm = source("fc", (2 * hidden, hidden)), source("norm", (hidden,))
    layer = layer_weights(config, source, "layers.0")
    return replace(target, layers=(layer,), norm=norm, fc=fc)


class EagleDraft:
    """The draft model. ``kv`` has as many slots as the target's pool."""

    def __init__(
        self, config: ModelConfig, weights: Weights, *, kv: KVPool, req_to_token: torch.Tensor
    ) -> None:
        self.kv = kv
        self._fc = weights.fc
        self._embedding = weights.embedding
        self._dtype = config.dtype
        self._decoder = Decoder(config, weights, kv=kv, req_to_token=req_to_token)

    def forward(self, batch: ForwardBatch, hidden_states: torch.Tensor) -> torch.Tensor:
        """The hidden states [T, hidden] of all tokens; ``hidden_states`` [T, hidden] are those of the preceding
        positions."""
        joined = torch.cat([embedding(batch.input_ids, self._embedding), hidden_states], -1)
        return self._decoder.layers(linear(joined, self._fc, None, self._dtype), batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [n, vocab] of the target's head."""
        return self._decoder.logits(hidden)
