"""Short runs on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from schedbench.profiles.platform.resolve import resolve
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Result
from schedbench.profiles.run.runner import ObserverFactory, unobserved
from schedbench.scenarios.loader import load

SMALL = [
    "workload.arrival.process=burst",
    "workload.requests=6",
    "workload.prompt_tokens={dist: uniform, min: 129, max: 160}",
    "workload.output_tokens={dist: uniform, min: 8, max: 24}",
    "model.dtype=float32",
]


@pytest.fixture(scope="session")
def run() -> Callable[..., Result]:
    """Runs the shipped mixed scenario, made small, on CUDA."""

    def running(*overrides: str, observe: ObserverFactory = unobserved) -> Result:
        resolved = resolve(load("mixed", [*SMALL, *overrides]))
        options = Options(device="cuda", save_tokens=True)
        return execute(resolved, options, observe=observe)

    return running


@pytest.fixture(scope="session")
def overlapped(run: Callable[..., Result]) -> Result:
    return run()
