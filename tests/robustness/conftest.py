"""Fuzzing in two lengths: a few seconds with fixed examples in the suite, any length with new examples in ``make
fuzz``."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.acceptance.runs import watch_runs_of

settings.register_profile("fuzz", settings.get_profile("tests"))

ALLOWANCE = 2**30  # bytes that reading something hostile may take


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    watch_runs_of(item)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation of much more address space than is in use raises MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ALLOWANCE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
