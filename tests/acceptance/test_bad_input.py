"""Mistakes of a user: an exit code, and one line for each mistake that says where it is and what was expected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.acceptance.runs import schedbench
from tests.conftest import RunCommand

EVERYTHING_WRONG = """\
name: wrong
model: {preset: tiny-lama, dtype: float32}
device: {hardware: h20}
engine:
  overlapp: true
  relay: pr25954
  pipeline: {async_depth: 2}
workload:
  trace: nowhere.jsonl
  format: jsonl
  sampling: {grammar: {regex: '[0-9'}}
"""

ALL_MISTAKES = """\
wrong.yaml:2: model.preset: unknown preset, did you mean 'tiny-llama'?
wrong.yaml:3: device.hardware: no hardware profile 'h20', did you mean 'h200'? (available: a100, h100, h200, mlx-like)
wrong.yaml:5: engine.overlapp: unknown key, did you mean 'overlap'?
wrong.yaml:6: engine.relay: unknown relay state, did you mean 'pr25945'?
wrong.yaml:7: engine.pipeline.async_depth: means something only with several stages
wrong.yaml:9: workload.trace: nowhere.jsonl: No such file or directory
wrong.yaml:11: workload.sampling.grammar: regex '[0-9': unclosed character class
"""

# By scenario, option and value.
ONE_MISTAKE = {
    ("mixed", "--relay", "latests"): "engine.relay: unknown relay state, did you mean 'latest'?",
    ("mixed", "--set", "engine.relay.barier=off"): "engine.relay.barier: unknown relay switch, did you mean 'barrier'?",
    ("mixed", "--set", "engine.relay.barrier=of"): "engine.relay.barrier: expected off",
    ("mixed", "--set", "engine.relay={state: latest, index: ring}"): "latest with index=ring: the ring ended",
    ("mixed", "--world", "distributed"): "distributed takes several ranks, and the scenario has one: see engine.",
    ("mixed", "--expect", "decode.schedul.sync=0"): "expect.decode.schedul: unknown key, did you mean 'schedule'?",
    ("mixed", "--set", "model.path=no"): "model.path: no/config.json: No such file or directory",
    ("mixed", "--set", "data_parallel.mlp=shared"): "engine.data_parallel.mlp: means something only with several ranks",
    ("encoder_decoder", "--set", "encoder_tokens=null"): "required by tiny-cross, which has an encoder",
    ("encoder_decoder", "--set", "chunked_prefill_size=64"): "expected none: the encoder's tokens of a prompt",
    ("block_diffusion", "--set", "page_size=32"): "expected a divisor of the 16 tokens of a block",
    ("block_diffusion", "--set", "temperature=0.5"): "expected greedy, no penalty",
    ("split_prefill", "--set", "chunked_prefill_size=64"): "expected none: with engine.split_prefill prompts run whole",
    ("split_prefill", "--set", "divisions=[{prefill: 112, decode: 40}]"): "h200 has 132 multiprocessors",
    ("split_prefill", "--set", "divisions=[{prefill: 8, decode: 8}, {prefill: 16, decode: 8}]"):
        "expected divisions with rising from_rows",
}  # fmt: skip


def test_all_mistakes_are_reported_at_once(
    tmp_path: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.yaml").write_text(EVERYTHING_WRONG)
    said = run_command("run", "wrong.yaml")
    assert (said.code, said.out) == (2, "")
    assert said.err.removeprefix("schedbench: ").splitlines() == ALL_MISTAKES.splitlines()


@pytest.mark.parametrize("mistake", ONE_MISTAKE, ids=" ".join)
def test_one_mistake_is_one_line(run_command: RunCommand, mistake: tuple[str, str, str]) -> None:
    said = run_command("run", *mistake)
    assert (said.code, said.out) == (2, "")
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith(f"schedbench: {mistake[1]}: ")
    assert ONE_MISTAKE[mistake] in said.err


def test_a_malformed_trace_line_is_named(tmp_path: Path, run_command: RunCommand) -> None:
    trace = tmp_path / "trace.jsonl"
    good = {"timestamp": 1, "input_length": 10, "output_length": 3, "hash_ids": [1]}
    trace.write_text(json.dumps(good) + "\n" + json.dumps(good | {"input_length": "ten"}) + "\n")
    said = run_command("run", "trace_mooncake", "--set", f"workload.trace={trace}")
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        f"schedbench: {trace}:2: input_length: expected a whole number of tokens from 1 to 16777216, got 'ten'\n"
    )


@pytest.mark.parametrize("kept", [0, 20, 200, 5000])
def test_truncated_weights_are_refused(run_command: RunCommand, checkpoint: Path, kept: int) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    said = run_command("run", "checkpoint", "--set", f"model.path={checkpoint}")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"schedbench: {weights}: ")
    assert len(said.err.splitlines()) == 1


def test_a_missing_device_is_refused_with_the_alternative(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run_command("run", "mixed", "--device", "cuda")
    assert (done.code, done.out) == (3, "")
    assert done.err == (
        "schedbench: no CUDA device here (torch.cuda.is_available() is False); --device vgpu emulates one\n"
    )


def test_mistakes_print_no_traceback() -> None:
    done = schedbench("run", "mixed", "--set", "engine.pollicy=lpm", "--set", "engine.policy=none")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 2
