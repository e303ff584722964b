"""A decoder's parameters: their names, shapes and sources, and the table of rotary angles.

Matrices are stored [inputs, outputs], contiguous, and products with the same input as one matrix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .config import ModelConfig, RopeScaling

Shape = tuple[int, ...]
# Returns the parameter of a name and shape, in the model's dtype, on the model's device.
ParameterSource = Callable[[str, Shape], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [hidden, (heads + 2 kv_heads) · head_dim]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    o: torch.Tensor  # [heads · head_dim, hidden]
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [hidden, 2 · intermediate]
    down: torch.Tensor  # [intermediate, hidden]
    indexer: torch.Tensor | None = None  # [hidden, (index heads + 1) · index head_dim + index heads]


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [hidden, vocab]
    cos_sin: torch.Tensor  # [max_positions, head_dim] float32 or float64
    # A draft's [2 · hidden, hidden]: the embedding's half, then the hidden state's.
    fc: torch.Tensor | None = None


def collect(
    config: ModelConfig, source: ParameterSource, cos_sin: torch.Tensor, layers: range | None = None
) -> Weights:
    """The parameters of ``config``, each requested once from ``source``. With only some ``layers`` the parameters
    before the first layer and after the last one are empty, unless these layers are included."""
    layers = range(config.num_layers) if layers is None else layers
    first, last = layers.start == 0, layers.stop == config.num_layers
    absent = cos_sin.new_empty(0, dtype=config.dtype)
    table = (config.vocab_size, config.hidden_size)
    embedding = source("embedding", table) if first or (last and config.tied_embeddings) else absent
    head = absent
    if last:
        head = embedding.t().contiguous() if config.tied_embeddings else source("lm_head", table[::-1])
    return Weights(
        embedding=embedding,
        layers=tuple(layer_weights(config, source, f"layers.{i}") for i in layers),
        norm=source("norm", (config.hidden_size,)) if last else absent,
        lm_head=head,
        cos_sin=cos_sin,
    )


def layer_weights(config: ModelConfig, source: ParameterSource, prefix: str) -> LayerWeights:
    """The parameters of one layer. Their names are ``prefix`` and a kind."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, (config.head_dim,)
    return LayerWeights(
        input_norm=source(f"{prefix}.input_norm", (hidden,)),
        qkv=source(f"{prefix}.qkv", (hidden, config.qkv_size)),
        qkv_bias=source(f"{prefix}.qkv_bias", (config.qkv_size,)) if config.attention_bias else None,
        q_norm=source(f"{prefix}.q_norm", head) if config.qk_norm else None,
        k_norm=source(f"{prefix}.k_norm", head) if config.qk_norm else None,
        o=source(f"{prefix}.o", (config.q_size, hidden)),
        post_norm=source(f"{prefix}.post_norm", (hidden,)),
        gate_up=source(f"{prefix}.gate_up", (hidden, 2 * inner)),
        down=source(f"{prefix}.down", (inner, hidden)),
        indexer=source(f"{prefix}.indexer", (hidden, config.indexer.size)) if config.indexer else None,
    )


def seeded_weights(
    config: ModelConfig, *, seed: int, device: torch.device, layers: range | None = None
) -> Weights:
    """Random weights, each parameter a function of (seed, its name) alone."""

    def source(name: str, shape: Shape) -> torch.Tensor:
        parameter = _seeded(name, shape, seed, device)
        return _scaled(parameter, name, config).to(config.dtype).to(device)

    return collect(config, source, cos_sin_table(config).to(device), layers)


# Factor of a faint token's scores: the likeliest of a hundred tokens is then never a faint one.
_FAINT = 0.1


def _scaled(parameter: torch.Tensor, name: str, config: ModelConfig) -> torch.Tensor:
    """``parameter`` of that name, scaled down if it is the last of a deeper layer's branch or scores a faint token."""
    if name == "lm_head" and config.faint_from is not None:
        parameter[:, config.faint_from :] *= _FAINT
    deeper = name.startswith("layers.") and not name.startswith("layers.0.")
    if config.deeper_scale == 1.0 or not deeper or not name.endswith((".o", ".down")):
        return parameter
    return parameter.mul_(config.deeper_scale)


# Sharpens attention, so that a change at a distant position changes the greedy tokens. With 1 such a model averages
# over its context and repeats itself.
_GAIN = 1.7


# How many values of a parameter are drawn, since drawing eight billion takes a host a minute. A larger parameter
# repeats them; because the period is prime, no two of its rows are equal.
_DRAWN = (1 << 17) - 1


def _seeded(name: str, shape: Shape, seed: int, device: torch.device) -> torch.Tensor:
    """A random parameter in float32, on the host or, if it is large, on the device. Every matrix preserves the variance
    of its input, except for the gain of q, k and v."""
    kind = name.rpartition(".")[2]
    gain = _GAIN if kind in ("qkv", "q_norm", "k_norm") else 1.0
    if kind.endswith("norm"):
        return torch.full(shape, gain)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    fan_in = shape[-1] if kind in ("embedding", "qkv_bias") else shape[0]
    size = math.prod(shape)
    drawn = torch.randn(min(size, _DRAWN), generator=generator).mul_(gain / math.sqrt(fan_in))
    if size <= _DRAWN:
        return drawn.view(shape)
    return drawn.to(device).repeat(-(-size // _DRAWN))[:size].view(shape)


def empty_weights(config: ModelConfig, *, device: torch.device, layers: range | None = None) -> Weights:
    """Uninitialised parameters, for a device that skips floating-point work."""

    def source(name: str, shape: Shape) -> torch.Tensor:  # noqa: ARG001
        return torch.empty(shape, dtype=config.dtype, device=device)

    table = torch.empty((config.max_positions, config.head_dim), dtype=torch.float32, device=device)
    return collect(config, source, table, layers)


def inverse_frequencies(config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    """[head_dim / 2], radians per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(dtype) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return (
        frequencies if config.rope_scaling is None else _scaled_frequencies(frequencies, config.rope_scaling)
    )


def _scaled_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Scale ``frequencies``, linearly between the two wavelengths original/high and original/low."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def cos_sin_table(config: ModelConfig) -> torch.Tensor:
    """[max_positions, head_dim] on the CPU: cosines of the angles, then sines."""
    dtype = torch.float64 if config.dtype == torch.float64 else torch.float32
    positions = torch.arange(config.max_positions, dtype=torch.int64).to(dtype)
    angles = torch.outer(positions, inverse_frequencies(config, dtype))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
