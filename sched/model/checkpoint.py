"""Reading a Hugging Face checkpoint directory: config.json and safetensors, whole or sharded. Unsupported values of
config.json are refused, with the key's name."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from reprlib import repr as show
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .config import ModelConfig, RopeScaling
from .weights import Shape, Weights, collect, cos_sin_table

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Each of our parameters, and the checkpoint's tensors that are concatenated along the outputs to make it.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "embedding": ("model.embed_tokens.weight",),
    "norm": ("model.norm.weight",),
    "lm_head": ("lm_head.weight",),
}
_LAYER_PARTS: Mapping[str, tuple[str, ...]] = {
    "input_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "o": ("self_attn.o_proj.weight",),
    "post_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}


class CheckpointError(Exception):
    """A checkpoint cannot be used. The message names the file and the reason."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason


def read_config(directory: Path, *, dtype_name: str | None = None) -> ModelConfig:
    """The model in ``directory``; ``dtype_name`` replaces that of the dtype it was saved in."""
    file = directory / "config.json"
    try:
        config = model_config(directory.name, _json_object(file))
    except ValueError as error:
        raise CheckpointError(file, str(error)) from None
    return config if dtype_name is None else replace(config, dtype_name=dtype_name)


def load_weights(
    directory: Path, config: ModelConfig, *, device: torch.device, layers: range | None = None
) -> Weights:
    """Load the parameters of ``config``, or of some of its layers, from ``directory`` in its dtype to ``device``."""
    tensors = Tensors(directory)

    def source(name: str, shape: Shape) -> torch.Tensor:
        stored = shape if name == "embedding" else shape[::-1]  # the checkpoint has [outputs, inputs]
        whole = tensors.joined(parts_of(name), stored)
        return (whole if name == "embedding" else whole.t()).to(config.dtype).contiguous().to(device)

    return collect(config, source, cos_sin_table(config).to(device), layers)


def parts_of(name: str) -> tuple[str, ...]:
    """The tensors of a checkpoint that make up our parameter ``name``."""
    if name in _PARTS:
        return _PARTS[name]
    _, layer, kind = name.split(".")
    return tuple(f"model.layers.{layer}.{part}" for part in _LAYER_PARTS[kind])


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(_regular(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(file, error.strerror or "cannot be read") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(file, f"expected a JSON object, got {type(value).__name__}")
    return value


def _regular(file: Path) -> Path:
    """Returns ``file`` if it is a regular file: opening or reading another one might never end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise CheckpointError(file, "not a regular file")
    return file


class Tensors:
    """The tensors of a directory by name, in one file or in shards. Files are opened on first use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[Path, Any] = {}
        self._shard_of: Mapping[str, str] | None = None
        if not (directory / WHOLE).exists():
            self._shard_of = self._index(directory / INDEX)

    def joined(self, names: tuple[str, ...], shape: Shape) -> torch.Tensor:
        """The concatenated tensors, which must have ``shape`` together."""
        parts = [self._read(name) for name in names]
        fits = all(part.shape[1:] == shape[1:] and part.dim() == len(shape) for part in parts)
        if not fits or sum(part.shape[0] for part in parts) != shape[0]:
            found = " + ".join(f"{name} {list(part.shape)}" for name, part in zip(names, parts, strict=True))
            raise CheckpointError(self._file(names[0]), f"{found}: config.json asks for {list(shape)}")
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, name: str) -> torch.Tensor:
        file = self._file(name)
        try:
            tensor: torch.Tensor = self._opened(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(file, f"{name}: {error}") from None
        if not tensor.is_floating_point():
            raise CheckpointError(file, f"{name}: holds {tensor.dtype}, not floating point")
        return tensor

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(_regular(file), framework="pt", device="cpu")
            except (OSError, ValueError, SafetensorError) as error:
                raise CheckpointError(file, f"cannot be opened: {error}") from None
        return self._open[file]

    def _file(self, name: str) -> Path:
        if self._shard_of is None:
            return self._directory / WHOLE
        if name not in self._shard_of:
            raise CheckpointError(self._directory / INDEX, f"{name}: not in the index")
        return self._directory / self._shard_of[name]

    @staticmethod
    def _index(file: Path) -> Mapping[str, str]:
        if not file.exists():
            raise CheckpointError(file.parent, f"neither {WHOLE} nor {INDEX} is here")
        shards = _json_object(file).get("weight_map")
        if not isinstance(shards, dict) or not all(
            isinstance(shard, str) and Path(shard).name == shard and len(shard) < 256
            for shard in shards.values()
        ):
            raise CheckpointError(file, "weight_map: expected an object from tensor names to file names")
        return shards


ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_DTYPES = ("float64", "float32", "bfloat16", "float16")
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
    positions = fields.integer("max_position_embeddings")
    if architecture == "MistralForCausalLM":  # its window equals full attention up to the window's length
        positions = min(positions, fields.integer("sliding_window", positions))
    key = "dtype" if "dtype" in raw else "torch_dtype"
    dtype = str(fields.any(key, "float32")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ValueError(f"{key}: expected one of {', '.join(_DTYPES)}, got {show(dtype)}")
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
        max_positions=positions,
        rope_theta=rope.number("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        qk_norm=architecture == "Qwen3ForCausalLM",
        attention_bias=architecture == "Qwen2ForCausalLM",
        tied_embeddings=bool(fields.any("tie_word_embeddings", False)),
        eos_token_ids=_eos(fields),
        dtype_name=dtype,
    )
    if heads % config.num_kv_heads:
        raise ValueError(
            f"num_key_value_heads: {heads} heads cannot share {config.num_kv_heads} of them evenly"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim: rotary positions need an even number, got {config.head_dim}")
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
