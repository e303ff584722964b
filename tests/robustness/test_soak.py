"""The memory of a run does not grow with its length, except for one row per request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from schedbench.profiles.measure.requests import RequestRecord
from schedbench.profiles.record.timeline import Call, Op, Range
from schedbench.profiles.vgpu.engine import EventRecording, Replay
from schedbench.profiles.vgpu.hazards.footprints import ByteSpan, Grid
from schedbench.profiles.vgpu.hazards.shadow import AccessHistory, Block, IssuedOp, MemoryAccess, ShadowMemory
from schedbench.profiles.vgpu.ledger import LedgerContext
from schedbench.profiles.vgpu.tensor import DeviceTensor
from schedbench.sched.config import SamplingParams
from schedbench.sched.memory.tree import TreeNode
from schedbench.sched.observe import StepInfo
from schedbench.sched.request import Request
from tests.robustness.soak import name_of

ROOT = Path(__file__).parents[2]
RECORD = 1024  # bytes that are kept of a request until the result is written: its record and its tokens
SLACK = 24 * 2**20  # of allocators, over a run of any length
KEPT = (RequestRecord, array)  # one of each per request
# Of these there are about as many at any time; the hazard checker prunes its own now and then.
STEADY = (DeviceTensor, EventRecording, Request, SamplingParams, TreeNode, Block, ShadowMemory)
PRUNED = (
    MemoryAccess,
    AccessHistory,
    IssuedOp,
    Grid,
    ByteSpan,
    Replay,
    Op,
    Call,
    Range,
    LedgerContext,
    StepInfo,
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


def alive(reading: Reading, kind: type) -> int:
    return int(reading["alive"].get(name_of(kind), 0))


def judge(readings: list[Reading], requests: int) -> None:
    """Compares with the first fifth of the run, after which every pool has been full."""
    early, late = readings[: len(readings) // 5 + 1], readings[len(readings) // 5 + 1 :]
    last = readings[-1]
    assert last["requests"] == requests
    assert last["retractions"] > 0
    grown = last["resident"] - early[-1]["resident"]
    assert grown < SLACK + RECORD * (requests - early[-1]["requests"])
    for reading in late[:-1]:
        for kind in (*STEADY, *PRUNED):
            most = max(alive(before, kind) for before in early)
            bound = 2 * most + 100 if kind in STEADY else 4 * most + 1000
            assert alive(reading, kind) <= bound, kind
    assert all(alive(last, kind) <= requests + 200 for kind in KEPT)
    assert (last["lost"], last["protected"], last["rows"]) == (0, 0, 0)
    assert alive(last, Request) <= RUNNING  # the last batch is still referenced


@pytest.mark.wide
@pytest.mark.parametrize("hazards", ["off", "on"])
def test_a_short_run_frees_its_memory(hazards: str) -> None:
    judge(soaked(600, hazards), 600)


@pytest.mark.slow
@pytest.mark.parametrize(("requests", "hazards"), [(100_000, "off"), (30_000, "on")])
def test_the_memory_of_a_long_run_does_not_grow(requests: int, hazards: str) -> None:
    readings = soaked(requests, hazards)
    for reading in (readings[1], readings[9], readings[-1]):  # after a tenth, at half, at the end
        figures = (reading["requests"], reading["steps"], reading["seconds"], reading["resident"] / 2**20)
        print("hazards {}: {:,} requests, {:,} steps, {} s, {:.0f} MiB".format(hazards, *figures))
    judge(readings, requests)
