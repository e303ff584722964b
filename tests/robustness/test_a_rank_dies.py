"""Ranks as processes, one of which is killed: every rank that waits for it reports this and stops, and none hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.acceptance.runs import command_line, plain_environment, schedbench
from tests.conftest import RunCommand

pytestmark = pytest.mark.wide

PATIENCE = 90.0  # seconds
LONG = ("workload.requests=4000", "measure.warmup_requests=0")
PAIR = "engine.disaggregation={mode: pair}"
TWO = "engine.disaggregation={mode: pair, prefill: 2}"


def others_of(process: subprocess.Popen[str]) -> list[int]:
    """Returns the processes of the other ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def started(
    others: int, folder: Path, scenario: str, *settings: str
) -> tuple[subprocess.Popen[str], list[int]]:
    """Starts the ranks and waits until their timelines grow."""
    overrides = [f"--set={each}" for each in (*settings, *LONG)]
    process = subprocess.Popen(
        command_line("run", scenario, "--world", "distributed", "--output-dir", folder, *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=plain_environment(),
        text=True,
    )
    deadline = time.monotonic() + PATIENCE
    while not any(file.stat().st_size for file in folder.iterdir()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    ranks = others_of(process)
    assert len(ranks) == others
    return process, ranks


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("scenario", "setting", "names", "victim"),
    [
        ("pp2", "engine.pipeline.stages=2", ("stage 1",), "stage 1"),
        ("pp2", "engine.pipeline.stages=3", ("stage 1", "stage 2"), "stage 2"),
        ("disagg", PAIR, ("decode 0", "router"), "decode 0"),
        ("disagg", TWO, ("prefill 1", "decode 0", "router"), "prefill 1"),
        ("disagg", PAIR, ("decode 0", "router"), "router"),
        ("dp_idle", "engine.data_parallel.ranks=2", ("rank 1",), "rank 1"),
        ("overlap_on", "engine.replicas=2", ("replica 1", "router"), "replica 1"),
    ],
)
def test_other_ranks_stop_and_name_the_killed_rank(
    tmp_path: Path, scenario: str, setting: str, names: tuple[str, ...], victim: str
) -> None:
    """The rank is killed while it works."""
    process, ranks = started(len(names), tmp_path, scenario, setting)
    rank = names.index(victim) + 1
    os.kill(ranks[rank - 1], signal.SIGKILL)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 4, said
    assert "is gone" in said
    assert f"{victim} ended with SIGKILL" in said
    lines = [line for line in said.splitlines() if not line.endswith(" s of the run")]  # but for progress
    assert len(lines) == 1
    assert not any(map(alive, ranks))


@pytest.mark.parametrize(
    ("scenario", "setting", "victim", "phase", "nth"),
    [
        ("pp2", "engine.pipeline.stages=2", "stage 1", "forward", 20),
        ("pp2", "engine.pipeline.stages=2", "stage 1", "requests", 5),
        ("pp2", "engine.pipeline.stages=3", "stage 1", "proxies", 20),
        ("disagg", PAIR, "decode 0", "transfer", 9),
        ("disagg", TWO, "prefill 1", "bootstrap", 5),
        ("dp_idle", "engine.data_parallel.ranks=2", "rank 1", "exchange", 9),
    ],
)
def test_a_scripted_death_ends_the_run(
    run_command: RunCommand, tmp_path: Path, scenario: str, setting: str, victim: str, phase: str, nth: int
) -> None:
    script = f"faults=[{{rank: {victim}, dies: {{phase: {phase}, nth: {nth}}}}}]"
    overrides = [f"--set={each}" for each in (setting, script, *LONG)]
    done = schedbench("run", scenario, "--world", "distributed", "--output-dir", tmp_path, *overrides)
    assert done.returncode == 4, done.stderr
    assert "is gone" in done.stderr
    assert f"{victim} ended with SIGKILL" in done.stderr
    drawn = run_command("trace", tmp_path)  # files of the other ranks are no result
    assert (drawn.code, drawn.out) == (2, ""), drawn.err
