"""Latencies of finished requests, each a distribution in ns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .distribution import Distribution
from .requests import RequestRecord

Instant = Literal["arrival", "first_scheduled", "prefilled", "transferred", "first_token", "finish"]


def between(records: Sequence[RequestRecord], start: Instant, end: Instant) -> Distribution:
    """Times from one instant to another, of the finished requests that have both."""
    spans = ((getattr(r, start), getattr(r, end)) for r in records if r.finished)
    return Distribution(to - begin for begin, to in spans if begin is not None and to is not None)


def tpot(records: Sequence[RequestRecord]) -> Distribution:
    """Time per output token after the first, rounded down to ns. Requests with a single token have none."""
    return Distribution(
        (r.finish - r.first_token) // (r.output_tokens - 1)
        for r in records
        if r.finished and r.first_token is not None and r.output_tokens > 1
    )
