"""Tests that need a GPU. Without one they are deselected, and the report says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from schedbench.profiles.result import Result
from schedbench.profiles.run.execute import Options, execute
from schedbench.profiles.run.resolve import resolve
from schedbench.profiles.run.runner import Watch, nobody
from schedbench.scenarios.loader import load

AWAY = pytest.StashKey[int]()
SMALL = [
    "workload.arrival.process=burst",
    "workload.requests=6",
    "workload.prompt_tokens={dist: uniform, min: 129, max: 160}",
    "workload.output_tokens={dist: uniform, min: 8, max: 24}",
    "model.dtype=float32",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    away = [item for item in items if item.get_closest_marker("cuda")]
    if away:
        items[:] = [item for item in items if item not in away]
        config.hook.pytest_deselected(items=away)
        config.stash[AWAY] = len(away)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    away = config.stash.get(AWAY, 0)
    if away:
        terminalreporter.write_line(f"{away} tests need a CUDA device and there is none here: deselected")


@pytest.fixture(scope="session")
def run() -> Callable[..., Result]:
    """Runs the shipped mixed scenario, made small, on CUDA."""

    def running(*overrides: str, watch: Watch = nobody) -> Result:
        resolved = resolve(load("mixed", [*SMALL, *overrides]))
        options = Options(device="cuda", save_tokens=True)
        return execute(resolved, resolved.relays[0], options, watch=watch).result

    return running


@pytest.fixture(scope="session")
def overlapped(run: Callable[..., Result]) -> Result:
    return run()
