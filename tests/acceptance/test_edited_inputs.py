"""Two results whose input files differ in content are not comparable, although their scenarios name the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedbench.profiles.platform import inputs
from schedbench.profiles.platform.resolve import resolve
from schedbench.profiles.ranks.execute import Options
from schedbench.profiles.record.environment import version
from schedbench.profiles.record.result import Result
from schedbench.profiles.sweeps.runs import Runs
from schedbench.scenarios.loader import load
from tests.conftest import RunCommand

SCENARIO = """\
name: traced
model: {preset: tiny-llama, dtype: float32}
device: {hardware: h200, values: none}
engine: {max_running_requests: 4, kv_tokens: 1024}
workload: {trace: t.jsonl, format: jsonl, requests: 2}
"""
LINE = '{"input_length": 8, "output_length": %d}\n'


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    (tmp_path / "t.jsonl").write_text(LINE % 4 + LINE % 5)
    (tmp_path / "s.yaml").write_text(SCENARIO)
    return tmp_path


def run_to(run_command: RunCommand, folder: Path, name: str) -> Path:
    assert run_command("run", folder / "s.yaml", "--output-dir", folder / name).code == 0
    return folder / name / "result.json"


@pytest.mark.parametrize(("output_length", "edited"), [(5, False), (6, True)])
def test_an_edited_trace_is_named(
    run_command: RunCommand, traced: Path, output_length: int, edited: bool
) -> None:
    before = run_to(run_command, traced, "before")
    (traced / "t.jsonl").write_text(LINE % 4 + LINE % output_length)
    after = run_to(run_command, traced, "after")
    parts = [json.loads(path.read_text())["scenario"] for path in (before, after)]
    assert parts[0]["sha256"] == parts[1]["sha256"] and (parts[0]["inputs"] != parts[1]["inputs"]) == edited
    found = run_command("compare", "--a", before, "--b", after)
    assert found.code == (2 if edited else 0)
    assert ("workload.trace, contents of t.jsonl" in found.err) == edited
    assert "damaged" not in found.err + found.out


def test_a_scenario_that_reads_no_file_has_no_inputs(run_command: RunCommand) -> None:
    found = run_command("run", "mixed", "--set", "workload.requests=2", "--format", "json")
    assert "inputs" not in json.loads(found.out)["scenario"]


def test_a_sweep_does_not_resume_with_another_trace_or_torch(traced: Path, tmp_path: Path) -> None:
    resolved = resolve(load(str(traced / "s.yaml")))
    runs = Runs(Options(device="vgpu"), folder=tmp_path / "sweep", resume=True)

    def answer() -> Result:
        (found,) = runs.answers([resolved])
        assert isinstance(found, Result)
        return found

    first = answer()
    assert answer().run.id == first.run.id
    kept = tmp_path / "sweep" / runs.file(resolved)
    kept.write_text(kept.read_text().replace(f'"torch": "{version("torch")}"', '"torch": "1.0"'))
    assert answer().run.id != first.run.id
    first = answer()
    (traced / "t.jsonl").write_text(LINE % 4 + LINE % 6)
    assert answer().run.id != first.run.id


def test_large_weights_are_sampled_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 16)
    content = bytearray(10_000)
    path = tmp_path / "model.safetensors"

    def digest(edit: int | None, *, size: int = 10_000) -> str:
        edited = bytearray(content[:size])
        if edit is not None:
            edited[edit] = 1
        path.write_bytes(edited)
        inputs._digest.cache_clear()
        [part] = inputs._file("model.path", "model.safetensors", path, whole=False)
        return part.sha256

    assert digest(None) == digest(None)
    assert len({digest(None), digest(0), digest(9_999), digest(None, size=9_999)}) == 4
