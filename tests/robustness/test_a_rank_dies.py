"""Ranks as processes, one of which is killed: whoever waits for it says so and stops; nobody hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.acceptance.questions import command, surroundings

PATIENCE = 90.0  # seconds


def others_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of the other ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def started(scenario: str, count: str, ranks: int, *more: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A run of that many ranks, by the key that counts them; the processes of all but the first."""
    settings = (f"{count}={ranks}", "workload.requests=4000", "measure.warmup_requests=0", *more)
    process = subprocess.Popen(
        command("run", scenario, "--world", "distributed", *(w for s in settings for w in ("--set", s))),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=surroundings(),
        text=True,
    )
    deadline = time.monotonic() + PATIENCE
    while len(others := others_of(process)) < ranks - 1:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return process, others


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("scenario", "count", "size", "victim", "after"),
    [
        ("pp2", "engine.pipeline.stages", 2, 0, 8.0),
        pytest.param("pp2", "engine.pipeline.stages", 3, 1, 10.0, marks=pytest.mark.wide),
        pytest.param("dp_idle", "engine.data_parallel.ranks", 2, 0, 10.0, marks=pytest.mark.wide),
    ],
)
def test_the_others_stop_and_say_who_is_gone(
    scenario: str, count: str, size: int, victim: int, after: float
) -> None:
    """Killed in the middle of its work, as far as seconds can tell."""
    process, ranks = started(scenario, count, size)
    time.sleep(after)
    os.kill(ranks[victim], signal.SIGKILL)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 4, said
    assert "is gone" in said or "could not send" in said
    assert f"rank {victim + 1} ended with SIGKILL" in said
    assert not any(map(alive, ranks))


@pytest.mark.parametrize(
    ("stages", "phase", "nth"),
    [
        (2, "forward", 20),
        pytest.param(2, "requests", 5, marks=pytest.mark.wide),
        pytest.param(2, "settle", 30, marks=pytest.mark.wide),
        pytest.param(3, "proxies", 20, marks=pytest.mark.wide),
        pytest.param(3, "tokens", 9, marks=pytest.mark.wide),
    ],
)
def test_it_kills_itself_at_an_exact_place(stages: int, phase: str, nth: int) -> None:
    script = f"faults=[{{rank: stage 1, dies: {{phase: {phase}, nth: {nth}}}}}]"
    process, ranks = started("pp2", "engine.pipeline.stages", stages, script)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 4, said
    assert "rank 0 waited for 'output', and rank" in said
    assert "rank 1 ended with SIGKILL" in said
    assert not any(map(alive, ranks))
