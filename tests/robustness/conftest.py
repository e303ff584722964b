"""Two lengths: a few seconds, the same every time, in the suite; any length, always different, in ``make fuzz``."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.acceptance.runs import watch_runs_of

settings.register_profile("fuzz", settings.get_profile("default"))

ALLOWANCE = 2**30  # bytes that reading something hostile may take


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    watch_runs_of(item)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """What asks for much more address space than there is in use gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ALLOWANCE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
