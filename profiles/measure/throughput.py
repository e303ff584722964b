"""Tokens and requests per second, over the full window and over the steady one.

The steady window is the longest stretch in which at least half as many requests run as at the peak; a request
runs from its first admission to its end. The earliest of equals is taken::

    running   |      ____      ______________________
              |   __|    |_   |                      |__
    peak / 2  |__|.........|__|.........................|__
                                <---- steady window --->
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .requests import RequestRecord, TokenLog


class TimeSpan(NamedTuple):
    """[start, end) in ns."""

    start: int
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


class Throughput(NamedTuple):
    """Per second of the full window."""

    output: float
    input: float
    total: float
    requests: float


class SteadyThroughput(NamedTuple):
    """Per second of the steady window."""

    output: float
    requests: float


def full_window(records: Sequence[RequestRecord]) -> TimeSpan | None:
    """First arrival to last end; None when no time passed between."""
    if not records:
        return None
    return _positive(min(r.arrival for r in records), max(r.finish for r in records))


def steady_window(records: Iterable[RequestRecord]) -> TimeSpan | None:
    levels = _levels(records)
    half = max((running for _, running in levels), default=0) / 2
    best: TimeSpan | None = None
    start: int | None = None
    for instant, running in levels:
        if running >= half and start is None:
            start = instant
        elif running < half and start is not None:
            if best is None or instant - start > best.end - best.start:
                best = TimeSpan(start, instant)
            start = None
    return best and _positive(*best)


def _levels(records: Iterable[RequestRecord]) -> list[tuple[int, int]]:
    """(instant, requests running from then on), in order."""
    changes: dict[int, int] = {}
    for record in records:
        if record.first_scheduled is not None:
            changes[record.first_scheduled] = changes.get(record.first_scheduled, 0) + 1
            changes[record.finish] = changes.get(record.finish, 0) - 1
    levels = []
    running = 0
    for instant in sorted(changes):
        running += changes[instant]
        levels.append((instant, running))
    return levels


def _positive(start: int, end: int) -> TimeSpan | None:
    return TimeSpan(start, end) if end > start else None


def throughput(records: Sequence[RequestRecord], tokens: TokenLog) -> Throughput | None:
    """None when no time passed."""
    window = full_window(records)
    if window is None:
        return None
    finished = [record for record in records if record.finished]
    prompt_tokens = sum(record.prompt_tokens for record in finished)
    return Throughput(
        output=tokens.total / window.seconds,
        input=prompt_tokens / window.seconds,
        total=(tokens.total + prompt_tokens) / window.seconds,
        requests=len(finished) / window.seconds,
    )


def steady_throughput(records: Sequence[RequestRecord], tokens: TokenLog) -> SteadyThroughput | None:
    """None when there is no steady window."""
    window = steady_window(records)
    if window is None:
        return None
    finishes = sum(record.finished and window.start < record.finish <= window.end for record in records)
    return SteadyThroughput(
        output=tokens.within(window.start, window.end) / window.seconds,
        requests=finishes / window.seconds,
    )
