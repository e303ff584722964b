"""Engines of other projects in run, compare, check and sweep, with a toy engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import schedbench as sb
from schedbench.profiles.engines import client
from schedbench.profiles.vgpu.adversary.executor import POISONED
from tests.conftest import RunCommand
from tests.profiles.engines.checkouts import checkout, git
from tests.profiles.engines.conftest import ADAPTER, SMALL

LOOP = """
import torch
def step(device):
    pass
def settled(device):
    torch.zeros(1, device=device){wait}
"""
TINY = tuple(part for override in SMALL for part in ("--set", override))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A toy engine with a tag ``v1`` and a later commit, ``main``, that waits."""
    folder = tmp_path_factory.mktemp("toy")
    checkout(folder, LOOP.format(wait=""))
    (folder / "python/toy/loop.py").write_text(LOOP.format(wait=".item()"))
    git(folder, "commit", "-q", "-a", "-m", "wait")
    yield folder
    client.end_engines()


@pytest.fixture
def engine(repository: Path) -> str:
    return f"{ADAPTER}:{repository}"


def test_run_names_the_engine(run_command: RunCommand, engine: str) -> None:
    said = run_command("run", "mixed", *TINY, "--engine", f"{engine}@v1", "--format", "md")
    assert said.code == 0
    assert "toy_adapter 1.0 v1 at " in said.out
    assert "host time modelled, not the engine's own (device.host=measured)" in said.out
    assert "relay" not in said.out


def test_compare_finds_the_line_that_changed(run_command: RunCommand, engine: str) -> None:
    asked = ("--a", f"{engine}@v1", "--b", f"engine={engine}@main", "--seeds", "1", "--draws", "2")
    said = run_command("compare", "mixed", *TINY, *asked, "--format", "json")
    assert said.code == 0
    found = json.loads(said.out)["comparison"]
    assert found["tokens"]["verdict"] == "equal"
    assert found["draws"] == {"count": 2, "abstained": None}
    copy = next(line for line in found["lines"] if line["what"] == "d2h pinned blocking")
    assert (copy["site"]["file"], copy["site"]["line"]) == ("python/toy/loop.py", 6)
    assert copy["site"]["statement"] == "torch.zeros(1, device=device).item()"
    assert (copy["a"], copy["b"]) == (0, 1)
    assert {"key": "labels.engine.ref", "a": "v1", "b": "main"} in found["comparability"]["differences"]
    assert found["candidate"]["engine"]["ref"] == "main"


def test_an_engine_is_compared_with_our_own_scheduler(run_command: RunCommand, engine: str) -> None:
    asked = ("--a", f"{engine}@v1,overlap=true", "--b", "relay=latest", "--seeds", "1", "--draws", "0")
    said = run_command("compare", "mixed", *TINY, *asked, "--format", "md")
    assert said.code == 0
    assert "tokens equal" in said.out
    assert "(toy_adapter 1.0 at " in said.out
    assert "relay latest" in said.out


@pytest.mark.wide
def test_check_runs_the_checks_that_an_engine_supports(run_command: RunCommand, engine: str) -> None:
    asked = ("--engine", f"{engine}@v1", "--seeds", "1", "--format", "json")
    said = run_command("check", "mixed", *TINY, *asked)
    content = json.loads(said.out)
    [report] = content["reports"]
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert verdicts == {
        "run": "passed",
        "tokens": "passed",
        "overlap": "passed",
        "hazards": "failed",
        "budget": "not applicable",
        "adversary": "passed",
    }
    assert said.code == 1
    assert report["engine"]["ref"] == "v1"
    assert {"contract", "invariants"} <= content["not_asked"].keys()
    assert "relays" not in content["not_asked"]


def test_functions_of_python_take_an_engine(engine: str) -> None:
    keys = {"model.preset": "tiny-deep", "device.values": "none", "workload.requests": 2, "expect": {}}
    found = sb.run("mixed", engine=f"{engine}@v1", **keys)
    assert found.document["labels"]["engine"]["ref"] == "v1"
    assert f"engine='{engine}@v1'" in found.document["run"]["command"]


@pytest.mark.wide
def test_check_compares_no_tokens_that_an_engine_draws(run_command: RunCommand, engine: str) -> None:
    asked = ("--engine", f"{engine}@v1", "--seeds", "1", "--format", "json")
    drawn = ("--set", "workload.sampling.temperature=0.8")
    [report] = json.loads(run_command("check", "mixed", *TINY, *drawn, *asked).out)["reports"]
    compared = {check["name"]: check for check in report["checks"] if check["name"] in ("tokens", "overlap")}
    assert {check["verdict"] for check in compared.values()} == {"not applicable"}
    assert "the order in which tokens are drawn" in compared["overlap"]["about"]


UNORDERED = """
import torch
def step(device):
    table, side = torch.zeros(4, dtype=torch.int64, device=device), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        places = torch.ones(2, dtype=torch.int64, device=device)
    table[places].tolist()
    side.synchronize()
"""


@pytest.mark.wide
def test_check_explains_an_index_that_is_poison(run_command: RunCommand, tmp_path: Path) -> None:
    """The error is of a read that does not wait for the write of its indices, which is the hazard at that line."""
    checkout(tmp_path, UNORDERED)
    asked = ("--engine", f"{ADAPTER}:{tmp_path}", "--adversarial", "0", "--set", "device.values=real")
    said = run_command("check", "mixed", *TINY, *asked, "--format", "json")
    client.end_engines()
    checks = {check["name"]: check for check in json.loads(said.out)["reports"][0]["checks"]}
    [found] = checks["adversary"]["evidence"]
    assert "IndexError: index -1000003 is out of bounds" in found["says"]
    assert f"; -1000003 {POISONED}" in found["says"]
    where = "python/toy/loop.py:8"
    hazard = next(item for item in checks["hazards"]["evidence"] if where in item["says"])
    assert found["says"].endswith(f"; the hazard there: {hazard['says']}")


@pytest.mark.wide
def test_check_fails_only_by_what_the_other_source_does_not_have(
    run_command: RunCommand, tmp_path: Path, engine: str
) -> None:
    """The tag has hazards, which the first source has in other lines, and the second has one more."""
    found = []
    for name, text in (("moved", "# A comment.\n" + LOOP.format(wait="")), ("other", UNORDERED)):
        checkout(tmp_path / name, text)
        asked = ("--engine", f"{ADAPTER}:{tmp_path / name}", "--against", f"{engine}@v1")
        said = run_command("check", "mixed", *TINY, *asked, "--adversarial", "1", "--format", "json")
        client.end_engines()
        content = json.loads(said.out)
        hazards = next(check for check in content["reports"][0]["checks"] if check["name"] == "hazards")
        assert content["reports"][0]["against"] == f"{engine}@v1"
        said_of_it = "not found in" if said.code else "known from"
        assert f"; {said_of_it} {engine}@v1" in content["conclusion"]
        found.append((said.code, len(hazards["known"]), [item["says"] for item in hazards["evidence"]]))
    (code, known, evidence), (other_code, other_known, others) = found
    assert (code, known, evidence) == (0, 3, [])
    assert (other_code, other_known) == (1, 3)
    assert others and all("python/toy/loop.py:8" in says for says in others)


@pytest.mark.wide
def test_check_of_a_failing_engine_has_its_error(run_command: RunCommand, tmp_path: Path) -> None:
    checkout(tmp_path, "def step(device):\n    raise ValueError('bad batch')\n")
    said = run_command("check", "mixed", *TINY, "--engine", f"{ADAPTER}:{tmp_path}", "--format", "json")
    client.end_engines()
    assert said.code == 1
    conclusion = json.loads(said.out)["conclusion"]
    assert "the run failed: ValueError: bad batch" in conclusion
    assert conclusion.startswith(f"mixed FAILED: run with {ADAPTER}:{tmp_path}; ")


@pytest.mark.wide
def test_sweep_over_versions_of_an_engine(
    run_command: RunCommand, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = f"engine={engine}@{{v1,main}}"
    asked = ("sweep", "mixed", *TINY, "--over", over, "--metric", "host_stall_us_per_step")
    said = run_command(*asked, "--output-dir", tmp_path, "--format", "json")
    assert said.code == 0
    content = json.loads(said.out)
    assert [cell["at"] for cell in content["cells"]] == [[f"{engine}@v1"], [f"{engine}@main"]]
    first, second = (cell["values"][0] for cell in content["cells"])
    assert second > first
    assert len({cell["results"][0] for cell in content["cells"]}) == 2
    monkeypatch.delattr("schedbench.profiles.sweeps.runs.execute")
    said = run_command(*asked, "--output-dir", tmp_path, "--resume")
    assert said.code == 0 and "host time modelled, not the engine's own" in said.out


def test_a_version_that_cannot_run_is_a_refused_cell(run_command: RunCommand, engine: str) -> None:
    asked = ("sweep", "mixed", *TINY, "--over", f"engine={engine}@{{v1,gone}}", "--metric", "ttft")
    said = run_command(*asked, "--format", "csv")
    assert said.code == 0
    assert "no such commit, branch or tag" in said.out


@pytest.mark.wide
def test_doctor_shows_whether_an_engine_can_run(
    run_command: RunCommand, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SCHEDBENCH_ENGINE_PYTHON", raising=False)
    said = run_command("doctor", "--engine", f"{engine}@v1", "--format", "json")
    assert said.code == 0
    checks = {check["name"]: check for check in json.loads(said.out)}
    assert checks["source"]["detail"].startswith("toy, 1.0, commit ")
    assert checks["import"]["ok"]
    assert "threads" not in checks
    needing = tmp_path / "needing.py"
    needing.write_text(
        ADAPTER.read_text().replace("str] = {}", "str] = {'not_installed': 'not-installed==1'}")
    )
    said = run_command("doctor", "--engine", engine.replace(str(ADAPTER), str(needing)))
    assert said.code == 3
    assert "for --engine-python engine-venv/bin/python:" in " ".join(said.out.split())
    assert said.out.endswith(" 'not-installed==1'\n")
    said = run_command("doctor", "--engine", f"{engine}@gone")
    assert (said.code, "no such commit" in said.err) == (3, True)


def test_a_commit_that_is_not_there_is_refused_before_any_side_runs(
    run_command: RunCommand, engine: str
) -> None:
    said = run_command("compare", "mixed", *TINY, "--a", f"{engine}@v1", "--b", f"{engine}@gone")
    assert (said.code, "@gone: no such commit, branch or tag" in said.err) == (3, True)
    assert "runs" not in said.err
