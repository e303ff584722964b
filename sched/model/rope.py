"""The table of rotary angles (arXiv 2104.09864), with Llama 3's scaling."""

from __future__ import annotations

import math

import torch

from .config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    """[head_dim / 2], radians per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(dtype) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else _scaled(frequencies, config.rope_scaling)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
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
