"""Work that is distributed over processes."""

from __future__ import annotations

import errno
import operator
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing import active_children
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from schedbench.profiles.check.adversaries import seeds
from schedbench.profiles.check.examine import Examiner
from schedbench.profiles.check.faults import with_faults
from schedbench.profiles.check.report import Report
from schedbench.profiles.platform import pool as pool_module
from schedbench.profiles.platform.pool import WorkersError, pool
from schedbench.profiles.platform.resolve import Resolved, ask
from schedbench.scenarios.problems import ScenarioError
from tests.json_programs import is_running

pytestmark = pytest.mark.processes


def test_answers_come_in_order() -> None:
    with pool(3) as each:
        assert list(each(operator.neg, [3, 1, 2])) == [-3, -1, -2]


def test_a_process_that_ends_abruptly_is_an_error_of_the_workers() -> None:
    with pytest.raises(WorkersError, match="ended abruptly"), pool(2) as each:
        list(each(os._exit, [3, 3]))


# Ends its process with SIGKILL, as the kernel does where memory runs out, unless the file is there.
KILLED_UNTIL = """(
    (file := __import__("pathlib").Path({!r})).exists()
    or (file.touch(), (own := __import__("os")).kill(own.getpid(), 9))
)"""


def test_a_killed_process_takes_no_other_task_along_and_its_own_runs_again(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("there", "killed", "later", "last")]
    for file in files[0::2]:
        file.touch()
    with pool(2) as each:
        assert list(each(eval, [KILLED_UNTIL.format(str(file)) for file in files])) == [True] * 4


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ([EOFError()], ""),
        ([ConnectionResetError(), EOFError()], "ended abruptly"),
        ([OSError(errno.EMFILE, "Too many open files")], "could not start: Too many open files"),
    ],
)
def test_a_process_that_cannot_be_forked_is_started_again(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception], message: str
) -> None:
    """The process from which it is forked has been killed. That the machine has no room for another one is said."""

    start = ForkServerProcess.start

    def fails(self: ForkServerProcess) -> None:
        if errors:
            raise errors.pop()
        start(self)

    monkeypatch.setattr(ForkServerProcess, "start", fails)
    refused = pytest.raises(WorkersError, match=message) if message else nullcontext()
    with refused, pool(1) as each:
        assert list(each(operator.neg, [3, 1])) == [-3, -1]


def test_a_task_that_ends_its_process_twice_fails_alone() -> None:
    ends = partial(os._exit, 3)
    with pool(2, lost=str) as each:
        slept, *lost, later = each(operator.methodcaller("__call__"), [time.time, ends, ends, time.time])
        assert all("where the task ran again" in reason for reason in lost) and slept < later
        assert list(each(operator.neg, [1])) == [-1]


def test_a_process_that_is_killed_while_it_sends_a_result_ends_its_task() -> None:
    """Some of these live shorter than it takes to send results that are far larger than what a pipe holds."""
    large = "(__import__('signal').setitimer(0, {}), bytes(200_000_000))[1]"
    with pool(1, lost=str) as each:
        results = list(each(eval, [large.format(seconds / 100) for seconds in range(1, 20, 2)]))
    assert {type(result) for result in results} >= {str} and len(results) == 10


CTRL_C = """
import sys, time
from schedbench.cli.errors import interruptible
from schedbench.profiles.platform.pool import pool

with interruptible():
    print(flush=True)
    with pool(2) as each:
        print(*each(time.sleep, [3600, 3600]))
"""


@pytest.mark.parametrize("after", [0.0, 0.02, 0.2, 1.0])
def test_ctrl_c_while_processes_start_prints_nothing_and_leaves_none(after: float) -> None:
    """A terminal sends it to all processes. The pipe of stderr is closed once all have ended."""
    program = [sys.executable, "-c", CTRL_C]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        time.sleep(after)
        os.killpg(parent.pid, signal.SIGINT)
        try:
            _, err = parent.communicate(timeout=600)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
        assert (parent.returncode, err) == (130, "")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_no_process_stays_behind_an_error(error: type[BaseException]) -> None:
    before = set(active_children())
    with pytest.raises(error), pool(2) as each:
        results = iter(each(time.sleep, [0, 3600, 3600]))
        next(results)
        raise error
    assert set(active_children()) <= before


def test_a_scenario_error_travels_between_processes() -> None:
    with pytest.raises(ScenarioError) as error:
        ask("mixed", ["engine.foo=1"])
    again = pickle.loads(pickle.dumps(error.value))
    assert (type(again), str(again), again.problems) == (
        ScenarioError,
        str(error.value),
        error.value.problems,
    )


def test_work_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(Exception, match="pickle"), pool(6) as each:
        list(each(lambda number: -number, range(6)))


@pytest.mark.wide
@pytest.mark.parametrize("faulty", [[], ["no-barrier"]])
def test_an_examination_is_the_same_in_processes(monkeypatch: pytest.MonkeyPatch, faulty: list[str]) -> None:
    """There, its adversaries begin before the watched run."""
    overrides = ["engine.relay=latest", "workload.requests=6", "workload.output_tokens=6"]
    question = with_faults(ask("faults/mixing", overrides), faulty)
    alone, spread = (_examined(monkeypatch, question, pooled=pooled) for pooled in (False, True))
    assert (spread.checks, spread.unproven) == (alone.checks, alone.unproven)
    assert bool(spread.failed) == bool(faulty)


def _examined(monkeypatch: pytest.MonkeyPatch, question: Resolved, *, pooled: bool) -> Report:
    monkeypatch.setattr(pool_module, "saves_time", lambda *_: pooled)
    return Examiner(question, seeds(1)).examine(question.relays[0])


PARENT = """
from schedbench.profiles.platform.pool import pool

REPORT = "print(__import__('os').getpid(), flush=True), __import__('time').sleep(3600)"
with pool(2) as each:
    list(each(eval, [REPORT, REPORT]))
"""


@pytest.mark.wide
def test_workers_end_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())  # a machine with one processor has one worker
        parent.kill()
        deadline = time.monotonic() + 30
        try:
            while is_running(worker) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not is_running(worker)
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
