"""The effect of moving the copy of the prompt to the forward stream (#25945), by prompt length.

The scenario ``prompt_staging`` over prompt lengths: what a prefill takes more (less, where negative) with the copy on
the forward stream than with it on the schedule stream, once without and once with the write-after-read barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..platform.resolve import ask
from ..ranks.execute import Options
from ..record.result import Result
from .ladder import climb

LENGTHS = (128, 512, 2048, 8192, 16384, 32768)


class Point(NamedTuple):
    """Microseconds per prefill that the move adds."""

    prompt_tokens: int
    without_barrier: float
    with_barrier: float


def prompt_lengths(lengths: Sequence[int] = LENGTHS, *overrides: str) -> list[Point]:
    """Emulated, and exact for the hardware profile. ``overrides`` as for ``run --set``."""
    return [_point(length, overrides) for length in lengths]


def _point(length: int, overrides: Sequence[str]) -> Point:
    question = ask("prompt_staging", [f"workload.prompt_tokens={length}", *overrides])
    rungs = climb(question, Options(device="vgpu")).rungs
    early, late, early_barrier, late_barrier = (_prefill_us(rung.outcome.result) for rung in rungs)
    return Point(length, late - early, late_barrier - early_barrier)


def _prefill_us(result: Result) -> float:
    ends = [request.finish for request in result.requests if request.finish is not None]
    return max(ends) / 1e3 / result.per_step["prefill"].steps
