"""Random models suited to tests: reproducible, varied, and attentive to their whole context."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from schedbench.sched.model.config import PRESETS
from schedbench.sched.model.weights import Weights, empty_weights, seeded_weights
from tests.sched.model.stages import decoder_stage

CPU = torch.device("cpu")
TINY = ["tiny-llama", "tiny-qwen3"]


def tensors(weights: Weights) -> dict[str, torch.Tensor]:
    named = {"embedding": weights.embedding, "norm": weights.norm, "lm_head": weights.lm_head}
    for i, layer in enumerate(weights.layers):
        values = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
        named |= {f"{i}.{name}": value for name, value in values.items() if value is not None}
    return named


@pytest.mark.parametrize("preset", TINY)
def test_a_parameter_follows_from_the_seed_and_its_name(preset: str) -> None:
    config = PRESETS[preset]
    deeper = replace(config, num_layers=config.num_layers + 1)
    first, again, other = (
        tensors(seeded_weights(c, seed=s, device=CPU)) for c, s in ((config, 4), (deeper, 4), (config, 5))
    )

    matrices = [name for name, tensor in first.items() if tensor.dim() == 2]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in matrices)


def test_a_large_parameter_repeats_drawn_values_but_no_row() -> None:
    """Its variance is that of a small parameter: 1 over the number of inputs."""
    config = replace(PRESETS["tiny-llama"], num_layers=1, intermediate_size=6000)
    down = seeded_weights(config, seed=0, device=CPU).layers[0].down  # [6000, 128]
    assert down.numel() > 2**17
    assert len({tuple(row) for row in down.tolist()}) == 6000
    assert down.std().item() == pytest.approx(6000**-0.5, rel=0.01)
    flat = down.flatten()
    assert torch.equal(flat[2**17 - 1 :], flat[: flat.numel() - 2**17 + 1])


@pytest.mark.parametrize("preset", TINY)
def test_parameters_are_counted(preset: str) -> None:
    config = PRESETS[preset]
    found = tensors(empty_weights(config, device=CPU))
    if config.tied_embeddings:
        del found["lm_head"]

    assert config.num_parameters == sum(tensor.numel() for tensor in found.values())


@pytest.mark.parametrize(
    ("preset", "billions"), [("qwen3-0.6b", 0.596), ("llama-3-8b", 8.03), ("llama-3-70b", 70.55)]
)
def test_presets_have_the_published_size(preset: str, billions: float) -> None:
    assert PRESETS[preset].num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("preset", TINY)
def test_an_old_token_changes_the_new_ones(preset: str) -> None:
    config = PRESETS[preset]
    scene = decoder_stage(config, seeded_weights(config, seed=0, device=CPU))
    prompt = torch.randint(0, config.vocab_size, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    base = scene.greedy(prompt, 32)

    for at in (0, 10, 100, 200):
        changed = [*prompt[:at], (prompt[at] + 1) % config.vocab_size, *prompt[at + 1 :]]
        assert scene.greedy(changed, 32) != base
    assert len(set(base)) > 16
