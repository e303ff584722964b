"""Every problem of a checkpoint is reported in one sentence that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from schedbench.sched.model.checkpoint import CheckpointError, load_weights, read_config
from tests.sched.model.checkpoints import CONFIG, SHAPES

CPU = torch.device("cpu")
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: torch.randn(shape) for name, shape in SHAPES.items()}, tmp_path / "model.safetensors")
    return tmp_path


def load(directory: Path) -> None:
    load_weights(directory, read_config(directory), device=CPU)


def with_config(directory: Path, changes: Mapping[str, Any]) -> None:
    values = {k: v for k, v in {**CONFIG, **changes}.items() if v is not ...}
    (directory / "config.json").write_text(json.dumps(values))


def test_products_with_one_input_are_stored_as_one(checkpoint: Path) -> None:
    saved = load_file(checkpoint / "model.safetensors")

    weights = load_weights(checkpoint, read_config(checkpoint), device=CPU)

    layer, prefix = weights.layers[0], "model.layers.0"
    parts = [saved[f"{prefix}.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(layer.qkv, torch.cat(parts).t())
    assert torch.equal(layer.o, saved[f"{prefix}.self_attn.o_proj.weight"].t())
    assert torch.equal(layer.gate_up[:, 24:], saved[f"{prefix}.mlp.up_proj.weight"].t())
    assert all(w.is_contiguous() for w in (layer.qkv, layer.o, layer.gate_up, layer.down, weights.lm_head))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: expected one of LlamaForCausalLM, "),
        ({"architectures": ...}, "architectures: expected one of LlamaForCausalLM, "),
        ({"hidden_size": ...}, "hidden_size: expected a positive integer, got None"),
        ({"hidden_size": "16"}, "hidden_size: expected a positive integer, got '16'"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected a positive integer, got True"),
        ({"vocab_size": 0}, "vocab_size: expected a positive integer, got 0"),
        ({"rms_norm_eps": [1]}, "rms_norm_eps: expected a positive number, got [1]"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 4 heads cannot share 3 of them evenly"),
        ({"head_dim": 5}, "head_dim: rotary positions need an even number, got 5"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias: not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantised weights are not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type: expected 'default' or 'llama3', got 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor: expected a positive number, got None"),
        ({"rope_scaling": [8.0]}, "rope_scaling: expected an object, got [8.0]"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected an integer or a list of integers, got '</s>'"),
        (
            {"torch_dtype": "int8"},
            "torch_dtype: expected one of float64, float32, bfloat16, float16, got 'int8'",
        ),
    ],
)
def test_an_unsupported_config_is_refused(checkpoint: Path, changes: dict[str, Any], reason: str) -> None:
    with_config(checkpoint, changes)

    with pytest.raises(CheckpointError) as caught:
        read_config(checkpoint)

    assert caught.value.file == checkpoint / "config.json"
    assert caught.value.reason.startswith(reason)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[]", "expected a JSON object, got list"),
        (None, "No such file"),
    ],
)
def test_an_unreadable_config_is_refused(checkpoint: Path, content: bytes | None, reason: str) -> None:
    file = checkpoint / "config.json"
    file.unlink() if content is None else file.write_bytes(content)

    with pytest.raises(CheckpointError, match=reason):
        read_config(checkpoint)


def without(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def truncated(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garbage(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x00" * 64)


def replaced(tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def replace(directory: Path) -> None:
        file = directory / "model.safetensors"
        tensors = load_file(file)
        tensors.pop(Q_PROJ) if tensor is None else tensors.__setitem__(Q_PROJ, tensor)
        save_file(tensors, file)

    return replace


def indexed(weight_map: Any) -> Callable[[Path], None]:
    def index(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "model-1.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return index


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (without, "", "neither model.safetensors nor model.safetensors.index.json is here"),
        (truncated, "model.safetensors", "cannot be opened"),
        (garbage, "model.safetensors", "cannot be opened"),
        (replaced(None), "model.safetensors", f"{Q_PROJ}: "),
        (replaced(torch.zeros(8, 16)), "model.safetensors", f"{Q_PROJ} [8, 16] + "),
        (replaced(torch.zeros(16)), "model.safetensors", f"{Q_PROJ} [16] + "),
        (replaced(torch.zeros(16, 16, dtype=torch.int8)), "model.safetensors", f"{Q_PROJ}: holds torch.int8"),
        (indexed(["a"]), "model.safetensors.index.json", "weight_map: expected an object"),
        (indexed({Q_PROJ: "../x"}), "model.safetensors.index.json", "weight_map: expected an object"),
        (indexed({}), "model.safetensors.index.json", "model.embed_tokens.weight: not in the index"),
        (indexed(dict.fromkeys(SHAPES, "gone.safetensors")), "gone.safetensors", "cannot be opened"),
    ],
)
def test_unusable_weights_are_refused(
    checkpoint: Path, damage: Callable[[Path], None], file: str, reason: str
) -> None:
    damage(checkpoint)

    with pytest.raises(CheckpointError) as caught:
        load(checkpoint)

    assert caught.value.file == checkpoint / file
    assert caught.value.reason.startswith(reason)
    assert str(caught.value).startswith(str(checkpoint / file))


def test_a_window_of_attention_limits_the_positions(checkpoint: Path) -> None:
    with_config(checkpoint, {"architectures": ["MistralForCausalLM"], "sliding_window": 48})

    assert read_config(checkpoint).max_positions == 48
