"""Sweeps over processes and over a cluster give the same cells, also where a worker is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import dask
import pytest
from distributed import LocalCluster

from schedbench.cli.arguments import use_workers
from schedbench.cli.errors import UsageError
from schedbench.profiles.platform import pool
from schedbench.profiles.platform.pool import WorkersError
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.ranks.execute import Options
from schedbench.profiles.sweeps.runs import Runs, Unable
from schedbench.profiles.sweeps.sweep import Cell, cells, planned
from tests.conftest import RunCommand

pytestmark = pytest.mark.processes

OF_THE_RUN = ("run", "environment")
NOWHERE = "dask:tcp://127.0.0.1:1"
FEW = ("workload.requests=4", "workload.output_tokens={dist: fixed, value: 8}", "device.values=none")


@pytest.fixture(autouse=True)
def own_workers() -> Iterator[None]:
    yield
    use_workers(None, None)


def swept(folder: Path | None = None, *, count: int, overrides: Sequence[str] = ()) -> Iterator[Cell]:
    seeds = "measure.seed=" + ",".join(map(str, range(count)))
    plan = planned("overlap_on", [seeds], overrides=(*FEW, *overrides), metric="throughput")
    return cells(plan, Runs(Options(device="vgpu"), folder=folder))


def documents(folder: Path) -> dict[str, object]:
    """Returns every document without what describes the run."""
    return {
        file.name: {key: part for key, part in json.loads(file.read_text()).items() if key not in OF_THE_RUN}
        for file in folder.rglob("*.json")
    }


@pytest.mark.parametrize(
    ("jobs", "executor", "message"),
    [
        (None, "tcp://here:1", "expected dask:ADDRESS"),
        (None, "dask:", "expected dask:ADDRESS"),
        (2, "dask:tcp://here:1", "give one of them"),
    ],
)
def test_invalid_workers_are_refused(jobs: int | None, executor: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        use_workers(jobs, executor)


def test_one_job_starts_no_processes() -> None:
    use_workers(1, None)
    assert not pool.saves_time(1000, 60.0)
    use_workers(None, None)
    assert pool.saves_time(1000, 60.0) == (pool.processors() > 1)


def test_results_are_read_in_order_while_few_tasks_are_ahead() -> None:
    asked = []

    def tasks() -> Iterator[int]:
        for number in range(1, 200):
            asked.append(number)
            yield number

    use_workers(2, None)
    with pool.pool(2) as each:
        results = iter(each(abs, tasks()))
        assert [next(results) for _ in range(3)] == [1, 2, 3]
        assert len(asked) < 20


def test_measured_times_refuse_a_cluster() -> None:
    use_workers(None, NOWHERE)
    with pytest.raises(WorkersError, match="measures the host's times"):
        list(swept(count=2, overrides=["device.host=measured"]))


def test_an_absent_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_CONNECT_S", 0.2)
    use_workers(None, NOWHERE)
    with pytest.raises(WorkersError, match="no dask scheduler at tcp:"):
        list(swept(count=2))


def test_a_task_that_ends_every_worker_of_a_cluster_fails_alone() -> None:
    few = dask.config.set({"distributed.scheduler.allowed-failures": 0})
    with few, LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as workers:
        use_workers(None, f"dask:{workers.scheduler_address}")
        with pool.pool(2, lost=str) as each:
            assert all("ended abruptly" in reason for reason in each(os._exit, [3]))
            assert list(each(abs, [-1])) == [1]


def test_an_executor_without_an_effect_is_named(run_command: RunCommand) -> None:
    few = [word for override in FEW for word in ("--set", override)]
    done = run_command("run", "overlap_on", *few, "--executor", NOWHERE)
    assert done.code == 0 and "--executor has no effect: this command spreads no runs" in done.err


def test_tasks_without_a_worker_are_said_to_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        return [one.message for one in caplog.records if one.name == pool.__name__]

    def scale_when_said() -> None:
        while not said():
            time.sleep(0.01)
        workers.scale(1)

    monkeypatch.setattr(pool, "_LISTEN_S", 0.05)
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as workers:
        use_workers(None, f"dask:{workers.scheduler_address}")
        with pool.pool(2) as each:
            assert list(each(abs, [-1])) == [1] and not pool.cluster_is_idle()
            workers.scale(0)
            while workers.scheduler.workers:  # the last one would still run a task
                time.sleep(0.01)
            tasks = each(abs, [-2])
            Thread(target=scale_when_said, daemon=True).start()
            assert list(tasks) == [2]
    assert said() == [f"schedbench: no worker is left at {workers.scheduler_address}: waiting for one"]


def test_a_lost_run_that_is_kept_may_be_resumed(tmp_path: Path) -> None:
    runs = Runs(Options(device="vgpu"), folder=tmp_path)
    assert str(runs._lost("a worker ended")) == "a worker ended; --resume runs it again"


def test_a_kept_run_of_another_device_does_not_end_the_others(tmp_path: Path) -> None:
    asked = ask("overlap_on", FEW)
    [_] = Runs(Options(device="vgpu"), folder=tmp_path).answers([asked])
    [answer] = Runs(Options(device="cuda"), folder=tmp_path, resume=True).answers([asked])
    assert isinstance(answer, Unable)


def test_a_cluster_whose_scheduler_ends_is_no_defect() -> None:
    """It cancels all tasks."""
    use_workers(None, NOWHERE)
    task = Future[int]()
    task.cancel()
    task.set_running_or_notify_cancel()
    with pytest.raises(WorkersError, match=r"the dask scheduler at tcp://127.0.0.1:1 has ended"):
        next(pool._results(ThreadPoolExecutor(), abs, deque([task]), iter([]), str))


@pytest.mark.parametrize("address", ["host", "ftp://host:1", "tcp://host:port"])
def test_an_invalid_address_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Without a client, which could not be closed."""
    monkeypatch.setattr("distributed.Client", None)
    use_workers(None, f"dask:{address}")
    with pytest.raises(WorkersError, match=f"no dask scheduler at {address}: "):
        list(swept(count=2))


@pytest.mark.wide
def test_processes_and_a_cluster_with_a_lost_worker_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_workers(1, None)
    alone = list(swept(tmp_path / "alone", count=24))
    monkeypatch.setattr(pool, "_START_S", 0.0)
    use_workers(2, None)
    assert list(swept(tmp_path / "pool", count=24)) == alone
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as workers:
        use_workers(None, f"dask:{workers.scheduler_address}")
        spread = swept(tmp_path / "cluster", count=24)
        first = [next(spread) for _ in range(4)]
        os.kill(next(iter(workers.workers.values())).pid, signal.SIGKILL)
        assert [*first, *spread] == alone
    assert documents(tmp_path / "alone") == documents(tmp_path / "pool") == documents(tmp_path / "cluster")
