"""The dimensions of a decoder, and model shapes by name.

The tiny shapes are our own, for a laptop; the others have their publishers' dimensions, except ``sparse-14b``: a dense
decoder of Qwen3-14B's size with the attention of DeepSeek-V3.2 and GLM-5, that is their indexer, and as many KV values
per token and layer as their latent has (576).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    dtype_name: str = "float32"

    @property
    def dtype(self) -> torch.dtype:
        import torch  # here, since the presets are named without it

        found: torch.dtype = getattr(torch, self.dtype_name)
        return found

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


_LLAMA_3_1 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)

_TINY_LLAMA = ModelConfig(
    name="tiny-llama",
    num_layers=2,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=256,
    vocab_size=512,
    max_positions=8192,
    eos_token_ids=(256,),
)
_TINY_EAGLE = replace(_TINY_LLAMA, name="tiny-llama-eagle", num_layers=4, deeper_scale=0.05)
_LLAMA_3_8B = ModelConfig(
    name="llama-3-8b",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_positions=131072,
    rope_theta=5e5,
    rope_scaling=_LLAMA_3_1,
    eos_token_ids=(128001, 128008, 128009),
    dtype_name="bfloat16",
)

_ALL = (
    _TINY_LLAMA,
    _TINY_EAGLE,
    replace(_TINY_LLAMA, name="tiny-deep", num_layers=4, hidden_size=64, head_dim=16, intermediate_size=128),
    replace(_TINY_EAGLE, name="tiny-text-eagle", faint_from=128),  # ids that are not ASCII
    replace(
        _TINY_LLAMA,
        name="tiny-qwen3",
        num_layers=3,
        hidden_size=96,
        num_heads=6,
        intermediate_size=192,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        qk_norm=True,
        tied_embeddings=True,
    ),
    replace(_TINY_LLAMA, name="tiny-cross", num_layers=4, cross_layers=(1, 3)),
    replace(_TINY_LLAMA, name="tiny-sparse", indexer=Indexer(heads=2, head_dim=16, top_k=32)),
    ModelConfig(
        name="qwen3-0.6b",
        num_layers=28,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        max_positions=40960,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        qk_norm=True,
        tied_embeddings=True,
        eos_token_ids=(151645, 151643),
        dtype_name="bfloat16",
    ),
    _LLAMA_3_8B,
    ModelConfig(
        name="sparse-14b",
        num_layers=40,
        hidden_size=5120,
        num_heads=40,
        num_kv_heads=2,
        head_dim=144,
        intermediate_size=17408,
        vocab_size=151936,
        max_positions=131072,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        indexer=Indexer(heads=64, head_dim=128, top_k=2048),
        eos_token_ids=(151645, 151643),
        dtype_name="bfloat16",
    ),
    replace(
        _LLAMA_3_8B,
        name="llama-3-70b",
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        intermediate_size=28672,
    ),
)

PRESETS: Mapping[str, ModelConfig] = MappingProxyType({config.name: config for config in _ALL})
