"""Reading a Hugging Face checkpoint directory: config.json and safetensors, whole or sharded."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .config import ModelConfig
from .hf_config import model_config
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


def read_config(directory: Path, *, dtype: torch.dtype | None = None) -> ModelConfig:
    """The model in ``directory``; ``dtype`` replaces the one it was saved in."""
    file = directory / "config.json"
    try:
        config = model_config(directory.name, _json_object(file))
    except ValueError as error:
        raise CheckpointError(file, str(error)) from None
    return config if dtype is None else replace(config, dtype=dtype)


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
        if not isinstance(shards, dict) or not all(_is_file_name(shard) for shard in shards.values()):
            raise CheckpointError(file, "weight_map: expected an object from tensor names to file names")
        return shards


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and Path(value).name == value and len(value) < 256
