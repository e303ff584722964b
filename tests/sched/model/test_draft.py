"""The draft model, derived from the target's first layer or read from a folder, and its use of a hidden state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from schedbench.sched.model.checkpoint import CheckpointError
from schedbench.sched.model.config import PRESETS
from schedbench.sched.model.draft import derived_weights, load_draft_weights, read_draft_config
from schedbench.sched.model.weights import Weights, seeded_weights
from tests.acceptance.runs import digest_of, result_of, value

TARGET = PRESETS["tiny-llama-eagle"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target() -> Weights:
    return seeded_weights(TARGET, seed=0, device=CPU)


def tensors(draft: Weights) -> dict[str, torch.Tensor]:
    """The tensors as a checkpoint names them."""
    [layer] = draft.layers
    q, k, v = layer.qkv.split([TARGET.q_size, TARGET.kv_size, TARGET.kv_size], 1)
    gate, up = layer.gate_up.chunk(2, 1)
    stored = {
        "fc.weight": draft.fc,
        "layers.0.self_attn.q_proj.weight": q,
        "layers.0.self_attn.k_proj.weight": k,
        "layers.0.self_attn.v_proj.weight": v,
        "layers.0.self_attn.o_proj.weight": layer.o,
        "layers.0.mlp.gate_proj.weight": gate,
        "layers.0.mlp.up_proj.weight": up,
        "layers.0.mlp.down_proj.weight": layer.down,
    }
    norms = {
        "norm.weight": draft.norm,
        "layers.0.input_layernorm.weight": layer.input_norm,
        "layers.0.post_attention_layernorm.weight": layer.post_norm,
    }
    return {name: matrix.t().contiguous() for name, matrix in stored.items()} | norms


def written(folder: Path, weights: Mapping[str, torch.Tensor], **changes: Any) -> Path:
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": TARGET.hidden_size,
        "intermediate_size": TARGET.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": TARGET.num_heads,
        "num_key_value_heads": TARGET.num_kv_heads,
        "vocab_size": TARGET.vocab_size,
        "max_position_embeddings": TARGET.max_positions,
        "rms_norm_eps": TARGET.rms_norm_eps,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(dict(weights), folder / "model.safetensors")
    return folder


def test_a_draft_reads_back_as_it_was_written(tmp_path: Path, target: Weights) -> None:
    derived = derived_weights(TARGET, target)
    folder = written(tmp_path / "draft", tensors(derived))
    config = read_draft_config(folder, TARGET)
    read = load_draft_weights(folder, config, target)

    assert (config.num_layers, config.dtype) == (1, TARGET.dtype)
    assert torch.equal(read.fc, derived.fc)
    assert read.embedding is target.embedding and read.lm_head is target.lm_head
    assert torch.equal(read.layers[0].qkv, target.layers[0].qkv)


def test_the_hidden_state_has_a_small_weight(target: Weights) -> None:
    fc = derived_weights(TARGET, target).fc
    identity = torch.eye(TARGET.hidden_size)
    assert torch.equal(fc[: TARGET.hidden_size], identity)
    assert 0 < fc[TARGET.hidden_size :].diagonal().max() < 0.01


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers: a draft has one layer, got 2"),
        ({"hidden_size": 64, "head_dim": 32}, "hidden_size: the target has 128, got 64"),
        ({"vocab_size": 9}, "vocab_size: the target has 512, got 9"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path, target: Weights
) -> None:
    folder = written(tmp_path / "draft", tensors(derived_weights(TARGET, target)), **changes)
    with pytest.raises(CheckpointError, match=reason):
        read_draft_config(folder, TARGET)


def test_a_missing_tensor_is_named(tmp_path: Path, target: Weights) -> None:
    parts = tensors(derived_weights(TARGET, target))
    del parts["fc.weight"]
    folder = written(tmp_path / "draft", parts)
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        load_draft_weights(folder, read_draft_config(folder, TARGET), target)


SMALL = ("workload.requests=6", "workload.output_tokens=24")


def test_runs_with_a_draft_from_a_folder(tmp_path: Path, target: Weights) -> None:
    """The derived draft written to a folder accepts as many tokens and a random one fewer; neither changes a token."""
    derived = tensors(derived_weights(TARGET, target))
    generator = torch.Generator().manual_seed(0)
    strange = {name: torch.randn(t.shape, generator=generator) / 8 for name, t in derived.items()}
    results = [result_of("spec_v2", *SMALL)]
    for name, weights in (("same", derived), ("strange", strange)):
        folder = written(tmp_path / name, weights)
        speculative = f"engine.speculative={{algorithm: eagle, draft: {folder}}}"
        results.append(result_of("spec_v2", *SMALL, speculative))

    plain, same, other = results
    assert digest_of(plain) == digest_of(same) == digest_of(other)
    assert value(same, "accept_length") == value(plain, "accept_length") > 2
    assert value(other, "accept_length") < 1.2


def test_only_deeper_layers_are_scaled_down() -> None:
    plain = seeded_weights(replace(TARGET, deeper_scale=1.0), seed=0, device=CPU)
    scaled = seeded_weights(TARGET, seed=0, device=CPU)
    assert torch.equal(scaled.layers[0].o, plain.layers[0].o)
    for name in ("o", "down"):
        full, small = (getattr(weights.layers[2], name) for weights in (plain, scaled))
        torch.testing.assert_close(small, full * TARGET.deeper_scale)
    assert torch.equal(scaled.layers[2].qkv, plain.layers[2].qkv)


def test_a_faint_token_is_scored_low_and_nothing_else_changes() -> None:
    config = PRESETS["tiny-text-eagle"]
    faint, plain = (seeded_weights(c, seed=0, device=CPU) for c in (config, replace(config, faint_from=None)))
    torch.testing.assert_close(faint.lm_head[:, 128:], plain.lm_head[:, 128:] * 0.1)
    assert torch.equal(faint.lm_head[:, :128], plain.lm_head[:, :128])
    assert torch.equal(faint.embedding, plain.embedding)
