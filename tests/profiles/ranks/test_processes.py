"""Starting the processes of a run, and ending them whatever they do."""

from __future__ import annotations

import os
import signal
import time

import pytest

from schedbench.cli.errors import exit_code
from schedbench.cli.run import run
from schedbench.profiles.ranks import processes
from schedbench.profiles.ranks.processes import WorldSizeError, local_addresses


def test_a_stopped_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs in native code would not handle the signal to end either."""
    monkeypatch.setattr(processes, "_GRACE", 0.5)
    begin = 0.0
    with processes._children(local_addresses(2)[1:], None) as ([process], ready):
        assert ready.acquire(timeout=60) and process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    assert process.exitcode == -signal.SIGKILL


def test_a_process_of_torchrun_is_a_rank_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Exception, match="one of 3 that torchrun started; --world distributed") as alone:
        run("pp2")
    with pytest.raises(WorldSizeError, match=r"the scenario has 2 ranks .*--nproc-per-node 2") as wrong:
        run("pp2", world="distributed", device="vgpu")
    assert [exit_code(alone.value), exit_code(wrong.value)] == [2, 2]
