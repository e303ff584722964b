"""Latencies of finished requests, each a distribution in ns."""

from __future__ import annotations

from collections.abc import Sequence

from .distribution import Distribution
from .requests import RequestRecord


def ttft(records: Sequence[RequestRecord]) -> Distribution:
    """Time to first token, from arrival."""
    return Distribution(
        r.first_token - r.arrival for r in records if r.finished and r.first_token is not None
    )


def queueing(records: Sequence[RequestRecord]) -> Distribution:
    """From arrival to first admission."""
    return Distribution(
        r.first_scheduled - r.arrival for r in records if r.finished and r.first_scheduled is not None
    )


def prefilling(records: Sequence[RequestRecord]) -> Distribution:
    """From first admission until the prompt was computed, where another worker did that."""
    return Distribution(
        r.prefilled - r.first_scheduled
        for r in records
        if r.finished and r.prefilled is not None and r.first_scheduled is not None
    )


def transfer(records: Sequence[RequestRecord]) -> Distribution:
    """From there until all KV had come."""
    return Distribution(
        r.transferred - r.prefilled
        for r in records
        if r.finished and r.transferred is not None and r.prefilled is not None
    )


def decode_queueing(records: Sequence[RequestRecord]) -> Distribution:
    """From there until the first token was known where it is decoded."""
    return Distribution(
        r.first_token - r.transferred
        for r in records
        if r.finished and r.first_token is not None and r.transferred is not None
    )


def tpot(records: Sequence[RequestRecord]) -> Distribution:
    """Time per output token after the first, to the nanosecond below; needs two tokens."""
    return Distribution(
        (r.finish - r.first_token) // (r.output_tokens - 1)
        for r in records
        if r.finished and r.first_token is not None and r.output_tokens > 1
    )


def e2e(records: Sequence[RequestRecord]) -> Distribution:
    """From arrival to the last token."""
    return Distribution(r.finish - r.arrival for r in records if r.finished)
