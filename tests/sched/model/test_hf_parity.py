"""Greedy tokens of random checkpoints written by transformers equal those of transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from schedbench.sched.model.checkpoint import load_weights, read_config
from tests.sched.model.stages import decoder_stage

pytestmark = pytest.mark.wide

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": [97, 98],
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaForCausalLM, {}),
    "llama tied": (transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama 3 rope": (transformers.LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "qwen2": (transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": (transformers.MistralForCausalLM, {"num_key_value_heads": 6}),
}
PROMPT = torch.randint(0, 97, (140,), generator=torch.Generator().manual_seed(3)).tolist()


def randomised(model: Any) -> Any:
    """Norms and biases are random too: transformers starts them at 1 and 0, which would hide a mix-up."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model.eval()


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@torch.no_grad()
def build(name: str) -> Any:
    torch.manual_seed(0)
    model, changes = MODELS[name]
    return randomised(model(model.config_class(**SHAPE | changes)))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)

    config = read_config(tmp_path)
    ours = decoder_stage(config, load_weights(tmp_path, config, device=CPU)).greedy(PROMPT, 24)

    assert config.eos_token_ids == (97, 98)
    assert ours == greedy(model, PROMPT, 24)
    assert len(set(ours)) > 3


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2

    config = read_config(tmp_path)
    ours = decoder_stage(config, load_weights(tmp_path, config, device=CPU)).greedy(PROMPT, 12)

    assert ours == greedy(model, PROMPT, 12)


def test_weights_are_converted_to_the_given_dtype(tmp_path: Path) -> None:
    build("qwen3").to(torch.bfloat16).save_pretrained(tmp_path)

    saved, asked = read_config(tmp_path), read_config(tmp_path, dtype_name="float32")
    weights = load_weights(tmp_path, asked, device=CPU)

    assert (saved.dtype, asked.dtype) == (torch.bfloat16, torch.float32)
    assert {weights.embedding.dtype, weights.layers[1].qkv.dtype, weights.norm.dtype} == {torch.float32}
