"""Tests whose requirements are missing are deselected. Tensors of tests are small, so a second thread would only cost
time."""

from __future__ import annotations

import gc
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer.main
import typer.testing
from hypothesis import settings

from schedbench.cli.app import main
from schedbench.profiles.platform import pool

# By marker: what its tests need, and whether that is available.
NEEDS: Mapping[str, tuple[str, Callable[[], bool]]] = {
    "cuda": ("a CUDA device", torch.cuda.is_available),
    "nixl": ("NIXL", lambda: find_spec("nixl") is not None),
}
AWAY = pytest.StashKey[dict[str, int]]()

# How long an example takes depends on what else the machine does.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--watch", action="store_true", help="watch every run for hazards (make wide)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests whose requirements are missing; the summary lists them."""
    config.stash[AWAY] = {}
    for marker, (what, is_here) in NEEDS.items():
        away = [item for item in items if item.get_closest_marker(marker)]
        if away and not is_here():
            items[:] = [item for item in items if item not in away]
            config.hook.pytest_deselected(items=away)
            config.stash[AWAY][what] = len(away)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, count in config.stash.get(AWAY, {}).items():
        terminalreporter.write_line(f"{count} tests need {what} and there is none here: deselected")


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Processes that tests start can be interrupted, even where the parent of the tests ignores SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def freeze_heap() -> Iterator[Callable[[], None]]:
    """Runs neither freeze and unfreeze the heap themselves nor count what is frozen, which walks all of it."""
    freeze = gc.freeze
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield freeze
    gc.unfreeze()  # The interpreter collects at its end.


@pytest.fixture(autouse=True)
def cheap_garbage_collection(freeze_heap: Callable[[], None]) -> None:
    """Every run begins with a full collection, which would mostly walk modules and the results of earlier tests.

    Each test therefore begins by freezing what remains of the tests before it.
    """
    gc.collect()
    freeze_heap()


class PicklingExecutor(Executor):
    """Runs each task at once in this process, on a copy that pickle made, as it does for other processes."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            call, given, named = pickle.loads(pickle.dumps((function, args, kwargs)))
            done.set_result(pickle.loads(pickle.dumps(call(*given, **named))))
        except Exception as error:
            done.set_exception(error)
        return done


@pytest.fixture(autouse=True)
def pools_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools start no processes, each of which imports torch, except in tests that are marked ``processes``."""

    @contextmanager
    def inline(_: int) -> Iterator[tuple[Executor, int]]:
        yield PicklingExecutor(), 1

    if request.node.get_closest_marker("processes") is None:
        monkeypatch.setattr(pool, "_processes_of", inline)
        monkeypatch.setattr(pool.forkserver, "ensure_running", lambda: None)


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """Typer builds all commands at each call, which takes longer than many of them."""
    built = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", built)
        patch.setattr(typer.testing, "_get_command", built)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nothing_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examinations skip the search for unproven waits, which takes runs of its own: test_unproven.py."""
    monkeypatch.setattr("schedbench.profiles.check.examine.unproven", lambda *_: [])


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str


RunCommand = Callable[..., CommandResult]


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Runs ``schedbench`` with arguments in this process; an error without an exit code passes through."""
    return _command(monkeypatch, capsys)


@pytest.fixture
def run_parent_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunCommand:
    """Like ``run_command``, with the output of the processes that the command starts."""
    return _command(monkeypatch, capfd)


def _command(monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> RunCommand:
    def run(*arguments: str | Path) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["schedbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        assert code is None or isinstance(code, int)
        return CommandResult(code or 0, *capture.readouterr())

    return run
