"""``--gate NAME:BOUND``: a bound that B has to keep, independent of the verdict.

``throughput:2%``, ``ttft_ms.p99:5%``    B may be this much worse than A, in the metric's own direction, and no more
``better:throughput:2%``    B has to be at least this much better
``decode.steady.schedule.h2d:0``    no step of B has more
``mixed.forward.sync:+1``           B's worst step has at most one more than A's
``added:0``, ``added.sync:0``       B's steps, of any kind, have no more copies and syncs, or syncs, than A's: neither
                                    the median step, nor more than by chance at lines that only B has
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Final, Literal, NamedTuple, get_args

from ...scenarios.problems import meant
from ...scenarios.schema import Counter, Kind, Stream
from ..captures.steps import UNKNOWN_KIND
from ..measure.budget import tallies
from ..measure.steps import STEADY, is_iteration, without_steps
from ..record.definitions import DEFINITIONS, definition
from ..record.result import PROGRAM, Abstained, Result
from .effects import ADDABLE, AddedCount, judged_name, metric_names, why_absent
from .reasons import Reason
from .verdict import Judgement

Passed = Literal["passed", "failed", "undecided"]

_BETTER: Final = "better:"
_ADDED: Final = "added"
_BOUND: Final = re.compile(r"([+-]?)(\d+(?:\.\d+)?)(%?)")
_UNNAMED: Final = re.compile(
    r"default|stream \d+"
)  # streams without a role, as captures and programs have them
_TOLERABLE: Final = frozenset({Reason.LOW_N, Reason.NOT_ENGAGED, Reason.CONSTANTS})  # the interval is valid


class GateError(ValueError):
    """A gate is invalid."""


class Gate(NamedTuple):
    """``place`` is the kind, stream and counter of a count; None for a metric. ``sign`` is empty for a plain bound on a
    count. ``better`` gates ask for an improvement of at least ``bound`` percent. ``added``: the counters of which a
    step may have no more than ``bound`` in addition; empty for other gates."""

    text: str
    name: str
    place: tuple[str, str, str] | None
    sign: str
    bound: float
    better: bool = False
    added: tuple[str, ...] = ()


class GateOutcome(NamedTuple):
    """``seen`` is the effect in percent, or the count that was compared with the bound; None where there is none.
    ``why`` is the reason of an undecided gate."""

    gate: str
    outcome: Passed
    seen: float | None
    why: str = ""


def parse(text: str) -> Gate:
    """Raises GateError, also for a bound that no value of the metric could break."""
    better = text.startswith(_BETTER)
    name, colon, bound = (part.strip() for part in text.removeprefix(_BETTER).rpartition(":"))
    match = _BOUND.fullmatch(bound)
    if not colon or not match:
        raise GateError(f"gate {text!r}: expected NAME:BOUND, such as throughput:2% or mixed.schedule.h2d:0")
    sign, number, unit = match.groups()
    place = _place(name)
    counters = tuple(counter for counter in ADDABLE if name in (_ADDED, f"{_ADDED}.{counter}"))
    if counters and not better:
        if sign or unit:
            raise GateError(f"gate {text!r}: expected a number of copies and syncs without a sign")
        return Gate(text, name, None, "", float(number), added=counters)
    metric = "" if place else _metric(name, text)
    if (place is None) != (unit == "%"):
        wanted = (
            "a number of copies, syncs or kernels" if place else f"a percentage, such as {name}:{number}%"
        )
        raise GateError(f"gate {text!r}: expected {wanted}")
    if place is not None:
        if better:
            raise GateError(f"gate {text!r}: better: is for metrics; give a count its sign, such as -1")
        return Gate(text, name, place, sign, float(number))
    gate = Gate(text, metric, None, sign, float(number), better)
    _require_meaning(gate)
    return gate


def _require_meaning(gate: Gate) -> None:
    """Refuse a sign that contradicts the gate, and a loss or gain that the metric cannot have."""
    rises = definition(gate.name).direction == "higher"
    if gate.sign and (gate.sign == "+") == (rises != gate.better):
        better, worse = ("more", "less") if rises else ("less", "more")
        is_so = f"{worse} {gate.name} is worse" if gate.better else f"{better} {gate.name} is better"
        raise GateError(
            f"gate {gate.text!r}: {is_so}; a gate bounds how much worse it may be"
            f" ({gate.name}:{gate.bound:g}%), or with better: how much better it has to be"
        )
    if gate.bound >= 100 and gate.better != rises:
        change = "better" if gate.better else "worse"
        raise GateError(f"gate {gate.text!r}: {gate.name} cannot get {gate.bound:g} % {change}")


def _place(name: str) -> tuple[str, str, str] | None:
    kind, _, rest = name.rpartition(".")
    kind, _, stream = kind.rpartition(".")
    known = kind in (*get_args(Kind), UNKNOWN_KIND, PROGRAM) and rest in get_args(Counter)
    named = stream in get_args(Stream) or _UNNAMED.fullmatch(stream)
    return (kind, stream, rest) if known and named else None


def _metric(name: str, text: str) -> str:
    try:
        return judged_name(name)
    except KeyError:
        if name in DEFINITIONS:
            why = f"neither more nor less {name} is better"
            if DEFINITIONS[name].direction != "none":
                why = f"{name} is a counter or a part of a metric; a gate is of a metric or of KIND.STREAM.COUNTER"
            raise GateError(f"gate {text!r}: {why}") from None
        near = meant(name, _names())
        what = f"{name!r} is no metric, no KIND.STREAM.COUNTER and no {_ADDED}.COUNTER"
        raise GateError(
            f"gate {text!r}: {what}{near or '; `schedbench explain` lists the metrics'}"
        ) from None


def _names() -> Iterator[str]:
    """What a gate can be of."""
    yield from (*metric_names(), _ADDED, *(f"{_ADDED}.{one}" for one in ADDABLE))
    yield from map(".".join, product(get_args(Kind), get_args(Stream), get_args(Counter)))


def check(
    gate: Gate,
    judged: Mapping[str, Judgement],
    *,
    a: Sequence[Result],
    b: Sequence[Result],
    more: Sequence[AddedCount],
) -> GateOutcome:
    """``more``: what B adds."""
    if gate.added:
        return _check_added(gate, a, b, more)
    if gate.place:
        return _check_count(gate, a, b)
    if found := judged.get(gate.name):
        return _check_metric(gate, found)
    why = why_absent(gate.name, (*a, *b)) or "not measured on both sides"
    return GateOutcome(gate.text, "undecided", None, why)


def _check_added(
    gate: Gate, a: Sequence[Result], b: Sequence[Result], added: Sequence[AddedCount]
) -> GateOutcome:
    """All counters of the gate together. A kind of step that A has not is no part of it, which is said."""
    kinds_a, kinds_b = ({kind for result in side for kind in +result.steps()} for side in (a, b))
    if not kinds_a & kinds_b:
        return GateOutcome(gate.text, "undecided", None, "no kind of step is on both sides")
    found = [one for one in added if one.counter in gate.added]
    sums = {kind: sum(one.more for one in found if one.kind == kind) for kind in {one.kind for one in found}}
    most = max(sums.values(), default=0.0)
    more = ", ".join(
        f"{one.kind} {one.counter} {one.more:+g}" for one in found if sums[one.kind] > gate.bound
    )
    new = sorted(kind for kind in kinds_b - kinds_a if is_iteration(kind))
    why = f"{', '.join(new)} steps, which A has none of, are not compared" if new else ""
    outcome: Passed = "failed" if more else "passed"
    return GateOutcome(gate.text, outcome, most, "; ".join(filter(None, (more, why))))


def _check_metric(gate: Gate, found: Judgement) -> GateOutcome:
    """Passed when the whole interval keeps the bound, failed when none of it does; where the hardware's constants were
    drawn, all effects under the draws have to agree."""
    seen = found.delta if math.isfinite(found.delta) else None  # A is 0
    doubts = [reason for reason in found.reasons if reason not in _TOLERABLE]
    if doubts or found.n == 0:
        return GateOutcome(gate.text, "undecided", seen, ", ".join(doubts) or "no pair is left")
    if found.floor is not None and found.needed is not None and found.resolve is None:  # measured in turns
        why = f"{found.n} measured, and an interval needs at least {found.needed} pairs"
        return GateOutcome(gate.text, "undecided", seen, why)
    outcome = _against(gate, *found.interval)
    if outcome == "undecided":
        return GateOutcome(gate.text, outcome, seen, "the bound lies inside the interval")
    drawn, why = found.firmness, ""
    if isinstance(drawn, Abstained):
        why = drawn.abstained
    elif drawn is not None and _against(gate, drawn.low, drawn.high) != outcome:
        why = f"the effects of {drawn.draws} draws of the hardware's constants lie on both sides"
    if why:
        return GateOutcome(gate.text, "undecided", seen, f"{Reason.CONSTANTS}: {why}")
    return GateOutcome(gate.text, outcome, seen)


def _against(gate: Gate, low: float, high: float) -> Passed:
    """Hold effects between ``low`` and ``high`` percent of A against the bound."""
    worst, best = (low, high) if definition(gate.name).direction == "higher" else (-high, -low)
    least = gate.bound if gate.better else -gate.bound
    return "passed" if worst >= least else "failed" if best < least else "undecided"


def _check_count(gate: Gate, a: Sequence[Result], b: Sequence[Result]) -> GateOutcome:
    assert gate.place is not None
    kind = gate.place[0]
    sides = (a, b) if gate.sign else (b,)
    if not all(any(result.steps()[kind] for result in side) for side in sides):
        reasons = (result.uncounted.get(kind.removesuffix(STEADY)) for side in sides for result in side)
        why = next(filter(None, reasons), without_steps(kind))
        return GateOutcome(gate.text, "undecided", None, why)
    seen = _worst(b, gate.place) - (_worst(a, gate.place) if gate.sign else 0)
    allowed = -gate.bound if gate.sign == "-" else gate.bound
    return GateOutcome(gate.text, "passed" if seen <= allowed else "failed", seen)


def _worst(results: Sequence[Result], place: tuple[str, str, str]) -> int:
    return max((tally.max for result in results for tally in tallies(result, *place)), default=0)
