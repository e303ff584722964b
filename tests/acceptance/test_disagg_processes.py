"""Disaggregated workers as processes over gloo: the tokens of one worker, and no hazards."""

from __future__ import annotations

import json

import pytest

from schedbench.profiles.platform.machine import MachineError
from schedbench.profiles.ranks import nixl
from schedbench.profiles.record.result import Abstained, Hazards, Result
from tests.acceptance.runs import (
    digest_of,
    executed,
    known_digest,
    resolved,
    result_of,
    schedbench,
    statuses,
    value,
)

PAIR = "engine.disaggregation={mode: pair}"
FOUR = "engine.disaggregation={mode: pair, prefill: 2, decode: 2}"
NIXL = "engine.disaggregation={mode: pair, transfer: nixl}"
FEW = (
    "workload.requests=6",
    "workload.prompt_tokens={dist: uniform, min: 16, max: 120}",
    "workload.output_tokens={dist: uniform, min: 1, max: 20}",
    "measure.warmup_requests=2",
)
CHUNKS = ("engine.chunked_prefill_size=32", "engine.page_size=16")
wide = pytest.mark.wide


def processes(scenario: str, *overrides: str) -> Result:
    question = resolved(scenario, *FEW, *overrides)
    return executed(question, world="distributed", hazards=True, save_tokens=True)


def alone(scenario: str) -> str:
    return known_digest(scenario, *FEW)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scenario", "way"),
    [
        ("mixed", (PAIR, *CHUNKS)),
        ("spec_v2", (PAIR,)),
        pytest.param("mixed", (NIXL,), marks=pytest.mark.nixl),
        pytest.param("mixed", (FOUR, "engine.disaggregation.transfer=nixl"), marks=pytest.mark.nixl),
        ("mixed", (FOUR,)),
        ("mixed", (FOUR, *CHUNKS, "engine.overlap=false")),
        ("mixed", (PAIR, "engine.relay=pr25944", "engine.mixed_chunk=false")),
        ("spec_v1", (PAIR,)),
        ("hisparse", (PAIR, "engine.relay=latest")),
        ("spec_v2", (FOUR, "engine.overlap=false")),
    ],
)
def test_the_tokens_are_those_of_one_worker(scenario: str, way: tuple[str, ...]) -> None:
    result = processes(scenario, *way)
    assert statuses(result) == {"finished"}
    assert digest_of(result) == alone(scenario)
    assert isinstance(result.hazards, Hazards) and not result.hazards.findings
    assert isinstance(result.metrics["ttft_ms"], Abstained)
    assert {rank.role for rank in result.ranks} == {"prefill", "decode"}


@wide
def test_fake_transfer_runs_between_processes() -> None:
    result = processes("mixed", "engine.disaggregation={mode: pair, transfer: fake}")
    assert statuses(result) == {"finished"} and isinstance(result.outputs, Abstained)


def test_distributed_transfer_takes_longer_and_changes_no_token() -> None:
    """In virtual time pages cross the network instead of NVLink."""
    near, far = (
        result_of("mixed", *FEW, f"engine.disaggregation={{mode: pair, transfer: {transfer}}}")
        for transfer in ("local", "distributed")
    )
    assert digest_of(far) == digest_of(near) == alone("mixed")
    assert value(far, "transfer_ms") > value(near, "transfer_ms")


def test_local_transfer_is_refused_between_processes() -> None:
    with pytest.raises(MachineError, match="local stays within one process"):
        processes("mixed", "engine.disaggregation={mode: pair, transfer: local}")


def test_hardware_without_links_is_refused() -> None:
    with pytest.raises(MachineError, match="mlx-like has no link 'nvlink'"):
        result_of("mixed", *FEW, PAIR, "device.hardware=mlx-like")


def test_missing_nixl_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "find_spec", lambda _: None)
    with pytest.raises(MachineError, match=r"pip install 'schedbench\[nixl\]'"):
        processes("mixed", NIXL)


def test_nixl_needs_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "find_spec", lambda _: "there")
    with pytest.raises(MachineError, match="--world distributed"):
        result_of("mixed", *FEW, NIXL)


@wide
def test_torchrun_starts_the_ranks() -> None:
    asked = ("run", "mixed", "--world", "distributed", *(f"--set={each}" for each in (PAIR, *FEW)))
    environment = {"OMP_NUM_THREADS": "1"}
    done = schedbench(*asked, "--format", "json", env=environment, ranks=3)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["outputs"]["digest"] == alone("mixed")
    few = schedbench(*asked, env=environment, ranks=2)
    assert (
        "2 processes were started, and the scenario has 3 ranks (prefill 0, decode 0, router)" in few.stderr
    )
    assert "torchrun --nproc-per-node 3" in few.stderr
