"""The scheduler's benchmark measures plausible times, and its rows name their aims."""

from __future__ import annotations

import pytest

from schedbench.profiles.bench import parts


@pytest.mark.parametrize("measure", [lambda: parts.decode_step_us(2), lambda: parts.admission_us(48)])
def test_a_figure_is_between_zero_and_some_microseconds(measure) -> None:  # type: ignore[no-untyped-def]
    assert 1 < measure() < 1e6
