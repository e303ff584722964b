"""The dimensions of a decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies: long wavelengths by ``factor``, short ones not at all."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Indexer:
    """DeepSeek-V3.2's lightning indexer, which selects the ``top_k`` tokens that a token attends to."""

    heads: int
    head_dim: int
    top_k: int

    @property
    def size(self) -> int:
        """Numbers per token: a query and a weight for each head, and one key."""
        return (self.heads + 1) * self.head_dim + self.heads


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. ``qk_norm`` is Qwen3's, ``attention_bias`` (on q, k, v) Qwen2's; with an
    ``indexer`` every layer attends to selected tokens only."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    qk_norm: bool = False
    attention_bias: bool = False
    tied_embeddings: bool = False
    indexer: Indexer | None = None
    # Layers that attend to an encoder's tokens instead of the request's own.
    cross_layers: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    # Seeded weights only: the output of all layers but the first is scaled by this factor, so that a draft that is the
    # first layer can guess the model's tokens.
    deeper_scale: float = 1.0
    # Seeded weights only: token ids from here on are hardly ever the likeliest, like ids of a trained model that are
    # not text, so that a draft without the grammar often proposes tokens that the grammar allows.
    faint_from: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def num_parameters(self) -> int:
        """Tied embeddings count once."""
        attention = self.hidden_size * (self.qkv_size + self.q_size)
        attention += self.qkv_size * self.attention_bias + 2 * self.head_dim * self.qk_norm
        attention += self.hidden_size * (0 if self.indexer is None else self.indexer.size)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size
