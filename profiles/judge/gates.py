"""``--gate NAME:BOUND``: a bound that B has to keep, independent of the verdict.

``throughput:-2%``   at most 2 % worse than A: a bound on the effect; the sign is that of the unwanted change
``ttft_ms.p99:+5%``
``decode.steady.schedule.h2d:0``    no step of B has more
``mixed.forward.sync:+1``           B's worst step has at most one more than A's
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, get_args

from ...scenarios.problems import meant
from ...scenarios.schema import Counter, Kind, Stream
from ..captures.steps import UNTOLD
from ..record.definitions import DEFINITIONS
from ..record.result import Result
from .metric_values import full_name
from .verdict import Judgement, Reason

Passed = Literal["passed", "failed", "inconclusive"]

_BOUND: Final = re.compile(r"([+-]?)(\d+(?:\.\d+)?)(%?)")
_TOLERABLE: Final = frozenset({Reason.LOW_N, Reason.NOT_ENGAGED})  # the interval is valid all the same


class GateError(ValueError):
    """A gate is invalid."""


class Gate(NamedTuple):
    """``place`` is the kind, stream and counter of a count; None for a metric. ``sign`` is empty for a plain bound."""

    text: str
    name: str
    place: tuple[str, str, str] | None
    sign: str
    bound: float


class GateOutcome(NamedTuple):
    """``seen`` is the effect in percent, or the count that was compared with the bound; None where there is none."""

    gate: str
    outcome: Passed
    seen: float | None
    why: str = ""


def parse(text: str) -> Gate:
    """Raises GateError."""
    name, colon, bound = text.rpartition(":")
    match = _BOUND.fullmatch(bound.strip())
    if not colon or not match:
        raise GateError(f"gate {text!r}: expected NAME:BOUND, such as throughput:-2% or mixed.schedule.h2d:0")
    sign, number, unit = match.groups()
    place = _place(name.strip())
    if (place is None) != (unit == "%"):
        wanted = "a percentage with its sign" if place is None else "a number of copies, syncs or kernels"
        raise GateError(f"gate {text!r}: expected {wanted}")
    if place is None and not sign:
        raise GateError(f"gate {text!r}: expected a sign, -2% or +2%")
    name = name.strip() if place else _metric(name.strip(), text)
    return Gate(text, name, place, sign, float(number))


def _place(name: str) -> tuple[str, str, str] | None:
    kind, _, rest = name.rpartition(".")
    kind, _, stream = kind.rpartition(".")
    kinds = (*get_args(Kind), UNTOLD)
    known = kind in kinds and stream in get_args(Stream) and rest in get_args(Counter)
    return (kind, stream, rest) if known else None


def _metric(name: str, text: str) -> str:
    try:
        return full_name(name)
    except KeyError:
        known = [entry.name for entry in DEFINITIONS.values() if entry.direction != "none"]
        raise GateError(
            f"gate {text!r}: {name!r} is no metric and no KIND.STREAM.COUNTER{meant(name, known)}"
        ) from None


def check(
    gate: Gate, judged: Mapping[str, Judgement], *, a: Sequence[Result], b: Sequence[Result]
) -> GateOutcome:
    return _check_count(gate, a, b) if gate.place else _check_metric(gate, judged.get(gate.name))


def _check_metric(gate: Gate, found: Judgement | None) -> GateOutcome:
    """Passed when the whole interval keeps the bound, failed when none of it does."""
    if found is None:
        return GateOutcome(gate.text, "inconclusive", None, "not measured on both sides")
    doubts = [reason for reason in found.reasons if reason not in _TOLERABLE]
    if doubts or found.n == 0:
        return GateOutcome(gate.text, "inconclusive", found.delta, ", ".join(doubts) or "no pair is left")
    low, high = found.interval
    if gate.sign == "-":
        kept, broken = low >= -gate.bound, high < -gate.bound
    else:
        kept, broken = high <= gate.bound, low > gate.bound
    if not kept and not broken:
        return GateOutcome(gate.text, "inconclusive", found.delta, "the bound lies inside the interval")
    return GateOutcome(gate.text, "passed" if kept else "failed", found.delta)


def _check_count(gate: Gate, a: Sequence[Result], b: Sequence[Result]) -> GateOutcome:
    assert gate.place is not None
    kind = gate.place[0]
    if not all(any(kind in result.per_step for result in side) for side in (a, b)):
        return GateOutcome(gate.text, "inconclusive", None, f"no step was of kind {kind}")
    seen: int = _worst(b, gate.place)
    if gate.sign:
        seen -= _worst(a, gate.place)
    allowed = -gate.bound if gate.sign == "-" else gate.bound
    return GateOutcome(gate.text, "passed" if seen <= allowed else "failed", seen)


def _worst(results: Sequence[Result], place: tuple[str, str, str]) -> int:
    kind, stream, counter = place
    found = (
        result.per_step[kind].streams.get(stream, {}).get(counter)
        for result in results
        if kind in result.per_step
    )
    return max((summary.max for summary in found if summary is not None), default=0)
