"""Reads Hugging Face's config.json as a ModelConfig. Unsupported values are refused, with the key's name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from reprlib import repr as show
from typing import Any

import torch

from .config import ModelConfig, RopeScaling

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Far above the values of any model, and low enough that products of several of them cannot overflow.
_MOST: Mapping[str, int] = {
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "vocab_size": 2**24,
}
_INT32 = 2**31 - 1


class _Fields:
    """Typed look-ups in a JSON object; ValueError names the key."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def any(self, key: str, default: Any = None) -> Any:
        value = self._raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value, most = self.any(key, default), _MOST.get(key, _INT32)
        if type(value) is not int or value <= 0:
            raise ValueError(f"{key}: expected a positive integer, got {show(value)}")
        if value > most:
            raise ValueError(f"{key}: expected at most {most}, got {show(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.any(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise ValueError(f"{key}: expected a positive number, got {show(value)}")
        return float(value)

    def choice(self, key: str, choices: Mapping[str, torch.dtype], default: str) -> torch.dtype:
        value = str(self.any(key, default)).removeprefix("torch.")
        if value not in choices:
            raise ValueError(f"{key}: expected one of {', '.join(choices)}, got {show(value)}")
        return choices[value]

    def object(self, key: str) -> Mapping[str, Any]:
        value = self.any(key, {})
        if not isinstance(value, dict):
            raise ValueError(f"{key}: expected an object, got {show(value)}")
        return value


def model_config(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """Raises ValueError, naming the key, for a value that is wrong, missing or not supported."""
    fields = _Fields(raw)
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    rope = _Fields({**raw, **fields.object("rope_scaling"), **fields.object("rope_parameters")})
    config = ModelConfig(
        name=name,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // heads),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_positions=_max_positions(fields, architecture),
        rope_theta=rope.number("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        qk_norm=architecture == "Qwen3ForCausalLM",
        attention_bias=architecture == "Qwen2ForCausalLM",
        tied_embeddings=bool(fields.any("tie_word_embeddings", False)),
        eos_token_ids=_eos(fields),
        dtype=fields.choice("dtype" if "dtype" in raw else "torch_dtype", _DTYPES, "float32"),
    )
    _check_heads(config)
    return config


def _architecture(fields: _Fields) -> str:
    named = fields.any("architectures", [])
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise ValueError(f"architectures: expected one of {', '.join(ARCHITECTURES)}, got {show(named)}")
    return str(named[0])


def _refuse_unsupported(fields: _Fields) -> None:
    """Raise ValueError for keys that would change the arithmetic and are not implemented."""
    if (activation := fields.any("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act: expected 'silu', got {show(activation)}")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if fields.any(key, False):
            raise ValueError(f"{key}: not supported")
    if fields.any("quantization_config", {}):
        raise ValueError("quantization_config: quantised weights are not supported")


def _max_positions(fields: _Fields, architecture: str) -> int:
    """The supported context. Mistral attends within a window, which equals full attention up to the window's length."""
    positions = fields.integer("max_position_embeddings")
    if architecture != "MistralForCausalLM":
        return positions
    return min(positions, fields.integer("sliding_window", positions))


def _rope_scaling(rope: _Fields) -> RopeScaling | None:
    kind = rope.any("rope_type", rope.any("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type: expected 'default' or 'llama3', got {show(kind)}")
    return RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.integer("original_max_position_embeddings"),
    )


def _eos(fields: _Fields) -> tuple[int, ...]:
    value = fields.any("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and abs(i) <= _INT32 for i in ids):
        raise ValueError(f"eos_token_id: expected an integer or a list of integers, got {show(value)}")
    return tuple(ids)


def _check_heads(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_key_value_heads: {config.num_heads} heads cannot share {config.num_kv_heads} of them evenly"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim: rotary positions need an even number, got {config.head_dim}")
