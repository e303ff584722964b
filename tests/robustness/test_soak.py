"""A run of any length takes the memory of its beginning, but for what it keeps of every request: its row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = 1024  # bytes that are kept of a request until the result is written: its record and its tokens
SLACK = 24 * 2**20  # of allocators, over a run of any length
KEPT = ("RequestRecord", "array")  # one of each for every request
# Of these there are about as many at any time; the hazard checker prunes its own now and then.
STEADY = ("DeviceTensor", "EventRecording", "Request", "SamplingParams", "TreeNode", "Block", "ShadowMemory")
PRUNED = (
    "MemoryAccess",
    "AccessHistory",
    "IssuedOp",
    "Grid",
    "ByteSpan",
    "RecordEntry",
    "WaitEntry",
    "ReplayEntry",
    "Op",
    "Call",
    "Range",
    "LedgerContext",
    "StepInfo",
)
RUNNING = 64  # requests of one batch
Reading = dict[str, Any]


def soaked(requests: int, hazards: str) -> list[Reading]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.robustness.soak", str(requests), hazards],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def judge(readings: list[Reading], requests: int) -> None:
    """Against the first fifth of the run: by then every pool has been full."""
    early, late = readings[: len(readings) // 5 + 1], readings[len(readings) // 5 + 1 :]
    last = readings[-1]
    assert last["requests"] == requests
    assert last["retractions"] > 0
    grown = last["resident"] - early[-1]["resident"]
    assert grown < SLACK + RECORD * (requests - early[-1]["requests"])
    for reading in late[:-1]:
        for name in (*STEADY, *PRUNED):
            most = max(before["alive"].get(name, 0) for before in early)
            bound = 2 * most + 100 if name in STEADY else 4 * most + 1000
            assert reading["alive"].get(name, 0) <= bound, name
    assert all(last["alive"][name] <= requests + 200 for name in KEPT)
    assert (last["lost"], last["protected"], last["rows"]) == (0, 0, 0)
    assert last["alive"]["Request"] <= RUNNING  # the last batch still stands


@pytest.mark.parametrize("hazards", [pytest.param("off", marks=pytest.mark.wide), "on"])
def test_a_short_run_leaves_nothing_behind(hazards: str) -> None:
    judge(soaked(600, hazards), 600)


@pytest.mark.slow
@pytest.mark.parametrize(("requests", "hazards"), [(100_000, "off"), (30_000, "on")])
def test_a_long_run_takes_the_memory_of_its_beginning(requests: int, hazards: str) -> None:
    readings = soaked(requests, hazards)
    for reading in (readings[1], readings[9], readings[-1]):  # after a tenth, at half, at the end
        told = (reading["requests"], reading["steps"], reading["seconds"], reading["resident"] / 2**20)
        print("hazards {}: {:,} requests, {:,} steps, {} s, {:.0f} MiB".format(hazards, *told))
    judge(readings, requests)
