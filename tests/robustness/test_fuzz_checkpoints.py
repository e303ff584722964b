"""Checkpoints: any bytes in any file are refused with a message, or are weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save

from schedbench.profiles.platform import capacity
from schedbench.profiles.platform.machine import MachineError
from schedbench.profiles.platform.resolve import ask
from schedbench.scenarios.problems import ScenarioError
from schedbench.sched.model.checkpoint import INDEX, WHOLE, CheckpointError, load_weights, read_config
from tests.robustness.hostile import (
    FUZZED,
    VALUES,
    as_json,
    mutated,
    refuses_cleanly,
    replaced,
    rounds,
    spliced,
)
from tests.sched.model.checkpoints import CONFIG, SHAPES

pytestmark = FUZZED

OTHER_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "head_dim",
    "sliding_window",
    "hidden_act",
    "dtype",
)
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
FULL = CONFIG | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}}
CPU = torch.device("cpu")
TENSORS = save({name: torch.zeros(shape) for name, shape in SHAPES.items()})
LENGTH = struct.unpack("<Q", TENSORS[:8])[0]
HEADER, BODY = json.loads(TENSORS[8 : 8 + LENGTH]), TENSORS[8 + LENGTH :]
QUOTED = 20_000  # safetensors quotes what it cannot use
WHERE = {"weight_map": dict.fromkeys(SHAPES, "part.safetensors")}


def packed(header: bytes, *, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + BODY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "part.safetensors").write_bytes(TENSORS)
    return tmp_path


def assert_loads_or_refuses(folder: Path) -> None:
    with refuses_cleanly(CheckpointError, longest=QUOTED):
        load_weights(folder, read_config(folder), device=CPU)


def assert_resolves_or_refuses(folder: Path, *overrides: str) -> None:
    """Reads the checkpoint and compares it with this machine's memory, as before a run; then loads it."""
    with refuses_cleanly(ScenarioError, MachineError, CheckpointError):
        resolved = ask("checkpoint", [f"model.path={json.dumps(str(folder))}", *overrides])
        capacity.check(resolved)
        load_weights(folder, resolved.model, device=CPU)


@rounds(25)
@given(document=mutated(FULL))
@example(document=CONFIG | {"max_position_embeddings": 2**31 - 1})
@example(document=CONFIG | {"num_hidden_layers": 10**9})
@example(document=CONFIG | {"num_hidden_layers": 2**31, "hidden_size": 2**31, "vocab_size": 2**31})
@example(document=CONFIG | {"rms_norm_eps": 10**400})
@example(document=CONFIG | {"eos_token_id": [10**30]})
def test_any_value_in_the_config(folder: Path, document: Any) -> None:
    (folder / WHOLE).write_bytes(TENSORS)
    (folder / "config.json").write_text(as_json(document))
    assert_resolves_or_refuses(folder)


@rounds(25)
@given(key=st.sampled_from(OTHER_KEYS), value=VALUES)
def test_any_value_of_a_key_that_may_be_left_out(folder: Path, key: str, value: Any) -> None:
    (folder / WHOLE).write_bytes(TENSORS)
    (folder / "config.json").write_text(as_json(CONFIG | {key: value}))
    assert_resolves_or_refuses(folder)


@rounds(25)
@given(content=spliced(json.dumps(CONFIG).encode()))
@example(content=b"[" * 10**6)
@example(content=b'{"a":' * 10**5)
@example(content=b"9" * 10**6)
def test_spliced_bytes_in_the_config(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with refuses_cleanly(CheckpointError):
        read_config(folder)


@rounds(150)
@given(content=mutated(HEADER).map(lambda header: packed(as_json(header).encode())) | spliced(TENSORS))
@example(content=packed(b"{}", length=2**63))
@example(content=packed(b"{}", length=2**64 - 1))
@example(content=packed(b"{}", length=10**8))
@example(content=packed(b'{"a":' * 10**5))
@example(content=packed(b"[" * 10**6))
def test_weights(folder: Path, content: bytes) -> None:
    (folder / WHOLE).write_bytes(content)
    assert_loads_or_refuses(folder)


@rounds(60)
@given(
    content=mutated(WHERE).map(lambda where: as_json(where).encode()) | spliced(json.dumps(WHERE).encode())
)
@example(content=json.dumps({"weight_map": dict.fromkeys(SHAPES, "a\0")}).encode())
@example(content=json.dumps({"weight_map": dict.fromkeys(SHAPES, "\ud800")}).encode())
@example(content=json.dumps({"weight_map": dict.fromkeys(SHAPES, "..")}).encode())
@example(content=json.dumps({"weight_map": dict.fromkeys(SHAPES, "/dev/zero")}).encode())
@example(content=json.dumps({"weight_map": dict.fromkeys(SHAPES, "config.json")}).encode())
def test_an_index_that_points_anywhere(folder: Path, content: bytes) -> None:
    (folder / INDEX).write_bytes(content)
    assert_loads_or_refuses(folder)


@pytest.mark.parametrize("name", ["config.json", WHOLE, INDEX])
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "/dev/zero"])
def test_paths_other_than_files(folder: Path, name: str, kind: str) -> None:
    replaced(folder / name, kind)
    with pytest.raises(CheckpointError), refuses_cleanly():
        load_weights(folder, read_config(folder), device=CPU)
