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
from tests.acceptance.cells import COLUMNS, Ask
from tests.acceptance.runs import result_of, watch_runs_of
from tests.sched.model.checkpoints import CONFIG, SHAPES

VOCAB = 300


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    watch_runs_of(item)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a Llama of one layer and random weights."""
    folder = tmp_path / "llama"
    folder.mkdir()
    config = CONFIG | {"vocab_size": VOCAB, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES | dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, 16))
    weights = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


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


@pytest.fixture(params=COLUMNS)
def state(request: pytest.FixtureRequest) -> str:
    """Each state that the ladder's tables have a column of."""
    name: str = request.param
    return name


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
