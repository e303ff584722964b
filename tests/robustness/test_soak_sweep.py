"""A sweep of a thousand cells takes the memory of its beginning, and gives the same results where it is killed and
resumed, and where a cluster loses a worker."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from distributed import LocalCluster

from schedbench.profiles.ranks.execute import Options
from schedbench.profiles.sweeps.runs import Runs
from schedbench.profiles.sweeps.sweep import cells, planned
from tests.profiles.sweeps.test_runs import documents

SCENARIO = "mixed"
SMALL = (
    *("device.values=none", "workload.requests=2"),
    *("workload.output_tokens={dist: fixed, value: 4}", "measure.warmup_requests=0"),
    "workload.prompt_tokens={dist: uniform, min: 16, max: 64}",
)
SEEDS, TOKENS = range(100), range(128, 138)
CELLS = len(SEEDS) * len(TOKENS)
OVER = (
    "measure.seed=" + ",".join(map(str, SEEDS)),
    "engine.chunked_prefill_size=" + ",".join(map(str, TOKENS)),
)
GROWN = 32  # MiB by which a process may grow after the first fifth of the cells


class Reading(NamedTuple):
    cells: int
    seconds: float
    parent: float  # MiB
    largest: float  # of its processes


def started(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    over, settings = (
        [word for one in words for word in (option, one)]
        for option, words in (("--over", OVER), ("--set", SMALL))
    )
    command = [sys.executable, "-m", "schedbench", "sweep", SCENARIO, *over, *settings, "--alone"]
    where = ["--output-dir", str(folder), "--format", "json"]
    with (folder.parent / "output").open("wb") as output:
        return subprocess.Popen(
            [*command, *where, *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=output,
        )


def watched(
    sweep: subprocess.Popen[bytes], folder: Path, at: int = CELLS + 1, then: Callable[[], None] = lambda: None
) -> list[Reading]:
    """The memory until the process ends. ``then`` is called once there are ``at`` cells."""
    readings, begin, process = [], time.monotonic(), psutil.Process(sweep.pid)
    while sweep.poll() is None:
        done = len(list((folder / "runs").glob("*.json")))
        if done >= at:
            at = CELLS + 1
            then()
        with suppress(psutil.NoSuchProcess):
            parent = process.memory_info().rss / 2**20
            sizes = [child.memory_info().rss / 2**20 for child in process.children(recursive=True)]
            if process.status() != psutil.STATUS_ZOMBIE:
                readings.append(Reading(done, time.monotonic() - begin, parent, max(sizes, default=0.0)))
        time.sleep(0.5)
    return readings


def judge(name: str, readings: list[Reading]) -> None:
    fifth = next(one for one in readings if one.cells >= CELLS // 5)
    half = next(one for one in readings if one.cells >= CELLS // 2)
    for one in (fifth, half, readings[-1]):
        print(
            f"{name}: {one.cells} cells, {one.seconds:.0f} s, {one.parent:.0f} MiB, largest process {one.largest:.0f}"
        )
    later = [one for one in readings if one.cells >= fifth.cells]
    assert max(one.parent for one in later) < fifth.parent + GROWN
    assert max(one.largest for one in later) < max(fifth.largest, 1) + GROWN


def killed_and_resumed(folder: Path, moment: int) -> None:
    sweep = started(folder, "--jobs", "2")
    watched(sweep, folder, moment, sweep.kill)
    kept = len(list((folder / "runs").glob("*.json")))
    print(f"killed with {kept} cells")
    assert sweep.returncode == -signal.SIGKILL and moment <= kept < CELLS
    resumed = started(folder, "--jobs", "2", "--resume")
    readings = watched(resumed, folder)
    assert resumed.returncode == 0, (folder.parent / "output").read_text()
    judge("resumed on two processes", readings)


def on_a_cluster_that_loses_a_worker(folder: Path, moment: int) -> None:
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as workers:
        sweep = started(folder, "--executor", f"dask:{workers.scheduler_address}")
        lost = next(iter(workers.workers.values())).pid
        readings = watched(sweep, folder, moment, lambda: os.kill(lost, signal.SIGKILL))
        print(f"worker killed with {moment} cells")
        assert sweep.returncode == 0, (folder.parent / "output").read_text()
        judge("on a cluster", readings)


@pytest.mark.slow
def test_a_thousand_cells_survive_a_kill_and_a_lost_worker(tmp_path: Path) -> None:
    chosen = random.Random(int(os.environ.get("SEED", "0")))
    for name in ("resumed", "cluster"):
        (tmp_path / name).mkdir()
    killed_and_resumed(tmp_path / "resumed" / "kept", chosen.randrange(CELLS // 20, CELLS // 6))
    on_a_cluster_that_loses_a_worker(tmp_path / "cluster" / "kept", chosen.randrange(CELLS // 4, CELLS // 2))
    found = documents(tmp_path / "resumed")
    assert len(found) == CELLS + 1 and found == documents(tmp_path / "cluster")
    few = planned(
        SCENARIO,
        [f"measure.seed={','.join(map(str, SEEDS[::20]))}", f"engine.chunked_prefill_size={TOKENS[-1]}"],
        overrides=SMALL,
        metric="output_throughput",
    )
    list(cells(few, Runs(Options(device="vgpu"), folder=tmp_path / "here")))
    assert documents(tmp_path / "here").items() <= found.items()
