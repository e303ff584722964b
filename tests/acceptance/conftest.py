"""A small checkpoint on disk, and runs of small traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from schedbench.profiles.record.result import Result
from tests.acceptance.cells import Ask
from tests.acceptance.runs import result_of, watch_runs_of

HIDDEN, INNER, VOCAB = 16, 24, 300


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    watch_runs_of(item)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a Llama of one layer and random weights."""
    folder = tmp_path / "llama"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 3,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) / 4 for name, shape in _shapes().items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    return {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        f"{attention}q_proj.weight": (HIDDEN, HIDDEN),
        f"{attention}k_proj.weight": (HIDDEN // 2, HIDDEN),
        f"{attention}v_proj.weight": (HIDDEN // 2, HIDDEN),
        f"{attention}o_proj.weight": (HIDDEN, HIDDEN),
        f"{mlp}gate_proj.weight": (INNER, HIDDEN),
        f"{mlp}up_proj.weight": (INNER, HIDDEN),
        f"{mlp}down_proj.weight": (HIDDEN, INNER),
    }


def _run_trace(
    folder: Path, requests: Sequence[tuple[int, int, int]], *overrides: str, **sampling: float
) -> Result:
    trace = folder / "trace.jsonl"
    lines = [
        {"input_length": prompt, "output_length": output, "timestamp": at, "sampling": sampling}
        for prompt, output, at in requests
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    scenario = folder / "steps.yaml"
    scenario.write_text(
        "name: steps\n"
        "model: {preset: tiny-llama}\n"
        "engine: {relay: pr25945, chunked_prefill_size: 256, max_running_requests: 8, kv_tokens: 4096}\n"
        "workload: {trace: trace.jsonl, format: jsonl}\n"
    )
    return result_of(scenario, *overrides)


@pytest.fixture
def ask_anew(tmp_path: Path) -> Ask:
    """Runs a trace of (input_length, output_length, timestamp in ms) on a tiny model."""
    return lambda requests, *overrides, **sampling: _run_trace(tmp_path, requests, *overrides, **sampling)


@pytest.fixture(scope="session")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Like ``ask_anew``, but equal questions of all tests of a process share one run. A test that replaces parts of the
    program uses ``ask_anew``."""
    folder = tmp_path_factory.mktemp("traces")

    @cache
    def run(
        requests: tuple[tuple[int, int, int], ...],
        overrides: tuple[str, ...],
        sampling: tuple[tuple[str, float], ...],
    ) -> Result:
        return _run_trace(folder, requests, *overrides, **dict(sampling))

    return lambda requests, *overrides, **sampling: run(
        tuple(requests), overrides, tuple(sorted(sampling.items()))
    )
