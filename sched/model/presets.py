"""Model shapes by name. The tiny ones are our own, for a laptop; the others have their publishers' dimensions, except
``sparse-14b``: a dense decoder of Qwen3-14B's size with the attention of DeepSeek-V3.2 and GLM-5, that is their
indexer, and as many KV values per token and layer as their latent has (576)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from .config import Indexer, ModelConfig, RopeScaling
from .names import PRESET_NAMES

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
    dtype=torch.bfloat16,
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
        dtype=torch.bfloat16,
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
        dtype=torch.bfloat16,
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
assert tuple(PRESETS) == PRESET_NAMES
