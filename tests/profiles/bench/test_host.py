"""The scheduler's bench measures something, and its rows say what is aimed at."""

from __future__ import annotations

import pytest

from schedbench.profiles.bench import host as bench_host


@pytest.mark.parametrize(
    "measure", [lambda: bench_host.decode_step_us(2), lambda: bench_host.admission_us(48)]
)
def test_a_figure_is_some_microseconds(measure) -> None:  # type: ignore[no-untyped-def]
    assert 1 < measure() < 1e6
