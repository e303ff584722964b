"""Lines fitted to samples of a known line."""

from __future__ import annotations

import random

import pytest

from schedbench.profiles.calibrate.fit import TimedSample, fit

SIZES = (0, 1, 4, 16, 64, 256)


def samples(a: float, b: float, *, each: int = 9, late: float = 0.0, noise: float = 0.0) -> list[TimedSample]:
    """``late``: the share of samples that a disturbance made ten times as long."""
    draw = random.Random(7)
    found = []
    for n in SIZES:
        for _ in range(each):
            ns = (a + b * n) * (1 + draw.uniform(-noise, noise))
            found.append(TimedSample(n, 10 * ns if draw.random() < late else ns))
    return found


@pytest.mark.parametrize(
    ("a", "b"), [(1000.0, 25.0), (20_000.0, 3_500.0), (5.0, 4000.0), (300.0, 0.0), (2000.0, 0.15)]
)
def test_a_line_is_found(a: float, b: float) -> None:
    line = fit(samples(a, b))
    assert line.a == pytest.approx(a, rel=1e-3)
    assert line.b == pytest.approx(b, rel=1e-3, abs=1e-3)
    assert line.residual == pytest.approx(0, abs=a * 1e-3)
    assert (line.samples, line.sizes) == (9 * len(SIZES), len(SIZES))


def test_both_constants_are_found_for_sizes_from_bytes_to_gigabytes() -> None:
    """For a copy's call and its bandwidth the intercept is a ten-thousandth of the longest time."""
    line = fit([TimedSample(n, 1500 + n / 50) for n in (4, 4096, 65536, 1 << 20, 1 << 26, 1 << 30)])
    assert line.a == pytest.approx(1500, rel=0.01)
    assert line.b == pytest.approx(1 / 50, rel=1e-3)


def test_disturbed_samples_hardly_matter() -> None:
    line = fit(samples(10_000, 500, each=15, late=0.2, noise=0.02))
    assert line.a == pytest.approx(10_000, rel=0.03)
    assert line.b == pytest.approx(500, rel=0.03)
    assert line.r2 is not None and line.r2 > 0.99


def test_one_disturbed_size_hardly_matters() -> None:
    disturbed = [s._replace(ns=5 * s.ns) if s.n == 16 else s for s in samples(10_000, 500)]
    line = fit(disturbed)
    assert line.a == pytest.approx(10_000, rel=0.05)
    assert line.b == pytest.approx(500, rel=0.05)
    assert line.r2 is not None and line.r2 < 0.99
    assert (line.worst_n, line.worst) == (16, pytest.approx(5, rel=0.1))


def test_samples_of_one_size_give_their_median() -> None:
    line = fit([TimedSample(8, 100), TimedSample(8, 110), TimedSample(8, 900)])
    assert (line.a, line.b, line.r2, line.residual) == (110, 0, None, 10)


def test_falling_times_give_a_constant() -> None:
    line = fit([TimedSample(1, 120), TimedSample(2, 110), TimedSample(3, 100)])
    assert line.b == pytest.approx(0, abs=1e-6)
    assert line.a == pytest.approx(110, rel=0.02)


def test_no_fitted_time_is_negative() -> None:
    line = fit([TimedSample(1, 0), TimedSample(2, 0), TimedSample(4, 0)])
    assert line.a == pytest.approx(0, abs=1e-6)
    assert line.b == pytest.approx(0, abs=1e-6)


def test_no_samples_give_no_line() -> None:
    with pytest.raises(ValueError, match="no samples"):
        fit([])
