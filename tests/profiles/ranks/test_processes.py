"""Starting the processes of a run, ending them in every case, and what a link says of an idle or hanging peer."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Literal

import pytest
import torch

from schedbench.cli.errors import UNABLE, exit_code
from schedbench.cli.run import run
from schedbench.profiles.platform.machine import MachineError
from schedbench.profiles.ranks import processes
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.ranks.processes import WorldSizeError, local_addresses
from schedbench.profiles.ranks.torchrun import TorchrunError, launched
from tests.acceptance.runs import resolved
from tests.json_programs import rank_processes


@pytest.mark.wide
def test_a_stopped_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs in native code would not handle SIGTERM either."""
    monkeypatch.setattr(processes, "_GRACE", 0.5)
    begin = 0.0
    with processes._children(local_addresses(2)[1:], None) as ([process], ready):
        assert ready.acquire(timeout=600) and process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    assert process.exitcode == -signal.SIGKILL


LAUNCH = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TORCHRUN = LAUNCH | {"TORCHELASTIC_RUN_ID": "none"}


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_process_of_torchrun_is_a_rank_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TORCHRUN)
    with pytest.raises(Exception, match="one of 3 that torchrun started; --world distributed") as alone:
        run("pp2")
    with pytest.raises(WorldSizeError, match=r"the scenario has 2 ranks .*--nproc-per-node 2") as wrong:
        run("pp2", world="distributed", device="vgpu")
    assert [exit_code(alone.value), exit_code(wrong.value)] == [2, 2]


@pytest.mark.parametrize("variables", [LAUNCH, {"RANK": "a", "MASTER_PORT": "tcp://10.0.0.1:29500"}])
def test_variables_of_other_programs_are_not_read(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    set_all(monkeypatch, variables)
    assert launched() is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "a", "RANK in the environment: expected a whole number from 0 to 2, got 'a'"),
        ("RANK", "3", "RANK in the environment: expected a whole number from 0 to 2, got '3'"),
        ("MASTER_PORT", "tcp://10.0.0.1:2", "MASTER_PORT .* from 1 to 65535, got 'tcp://10.0.0.1:2'"),
        ("MASTER_ADDR", "", "MASTER_ADDR in the environment: expected a value, got nothing"),
    ],
)
@pytest.mark.parametrize("world", ["virtual", "distributed"])
def test_invalid_variables_of_torchrun_are_usage_errors(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    message: str,
    world: Literal["virtual", "distributed"],
) -> None:
    set_all(monkeypatch, TORCHRUN | {name: value})
    with pytest.raises(TorchrunError, match=message) as invalid:
        run("pp2", world=world, device="vgpu")
    assert exit_code(invalid.value) == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"adversary": 0}, "a real device does so itself"),
        ({"hazards": True}, "the scenario has several ranks: hazards are checked on one device only"),
    ],
)
def test_modes_that_cuda_cannot_run_in_several_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    question = resolved("pp2", "device.values=real", "model={preset: tiny-llama, dtype: float32}")
    chosen = Options(device="cuda", world="distributed", **options)
    with pytest.raises(MachineError, match=why) as refused:
        execute(question, chosen)
    assert exit_code(refused.value) == UNABLE


@pytest.mark.wide
def test_an_idle_peer_is_alive_and_a_hanging_one_is_gone() -> None:
    with rank_processes("profiles.ranks.slow_peer_process", 2) as (first, _):
        said, _ = first.communicate(timeout=600)
    word, end = said.splitlines()
    assert word == "late [0, 1, 2]"
    assert end.startswith("the one waited for any of word, and the other is gone: it does not answer")
