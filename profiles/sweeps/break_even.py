"""Where the better side of a sweep changes along its first axis, whether it does so under draws of the hardware's
constants, and the sweep as a versioned document that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any, Final, NamedTuple

from ..judge.draws import HARDWARE, LEFT_OUT, Profiles, drawn_profile, draws, followed, uncertain
from ..judge.local import run_each
from ..judge.trials import in_short
from ..judge.verdict import MIN_EFFECT
from ..platform.pool import MapFunction, pool
from ..platform.resolve import Resolved
from ..record.environment import environment, tool
from .conclusion import sweep_conclusion
from .sweep import Cell, Place, SweepPlan, Tone, answered, questions_at

# History: 1.0 the first; 1.1 repeats break-evens under draws of the hardware's constants; 1.2 has a conclusion; 1.3 has
# the smallest effect of interest, no candidate where tokens differ, and remarks on requests that were not served; 1.4
# names the hardware, and the kinds of host time of all cells.
SCHEMA_VERSION: Final = "1.4"

Document = dict[str, Any]


class Crossing(NamedTuple):
    """Between ``low`` and ``high`` of the first axis the sign changes; ``row`` has the values of the other axes."""

    row: tuple[str, ...]
    low: str
    high: str
    tone: Tone  # beyond


class DrawnCrossing(NamedTuple):
    """``holding`` of ``draws`` draws have a change to the same side in the row, and all of these lie between ``low``
    and ``high``. ``constant`` is the one that the difference at the crossing follows most, with their rank
    correlation."""

    draws: int
    holding: int
    low: str
    high: str
    constant: str
    correlation: float

    @property
    def stands(self) -> bool:
        return self.holding == self.draws


class DrawnCrossings(NamedTuple):
    """The crossings that were run again; ``abstained`` is the reason where there are none. ``failed``: a run ended in
    an error."""

    found: Mapping[Crossing, DrawnCrossing]
    abstained: str = ""
    failed: bool = False


def crossings(plan: SweepPlan, found: Sequence[Cell]) -> tuple[Crossing, ...]:
    """Where the sign changes along the first axis, for every place on the others. Cells without a sign are passed
    over."""
    return tuple(
        Crossing(row, before.place[0], after.place[0], after.sign)
        for row in product(*(axis.values for axis in plan.axes[1:]))
        for before, after in pairwise(_signed(found, row))
        if after.sign is not None and before.sign != after.sign
    )


def _signed(found: Sequence[Cell], row: tuple[str, ...]) -> list[Cell]:
    return [cell for cell in found if cell.place[1:] == row and cell.sign in ("better", "worse")]


def _not_drawn(plan: SweepPlan, found: Sequence[Cell], crossed: Sequence[Crossing], count: int) -> str:
    keys = {axis.key for axis in plan.axes} | {key for side in plan.sides for key in side.varied}
    reasons = (
        (LEFT_OUT, not count),
        ("times were measured", not all(labels.exact for cell in found for labels in cell.labels)),
        (f"the sweep sets {HARDWARE}", HARDWARE in keys),
        (
            "the profile has no range for any constant",
            bool(crossed) and not uncertain(_asked(plan, (crossed[0].low, *crossed[0].row))[0].hardware),
        ),
    )
    return next((reason for reason, holds in reasons if holds), "")


def ask_again(plan: SweepPlan, found: Sequence[Cell], count: int) -> DrawnCrossings:
    """Run each crossing again under ``count`` draws: first the cells on either side of it, then the whole row under
    those draws that move it. Where a run fails, in whatever way, there are none."""
    crossed = crossings(plan, found)
    why = _not_drawn(plan, found, crossed, count)
    if why or not crossed:
        return DrawnCrossings({}, why)
    try:
        with pool(4 * count) as each:  # two sides, at either end
            return DrawnCrossings({one: _drawn(plan, found, one, count, each) for one in crossed})
    except Exception as error:
        return DrawnCrossings({}, f"a run under draws failed: {in_short(error)}", failed=True)


def _asked(plan: SweepPlan, place: Place) -> Sequence[Resolved]:
    questions = questions_at(plan, place)
    assert not isinstance(questions, str)  # the cell has run
    return questions


def _drawn(
    plan: SweepPlan, found: Sequence[Cell], crossing: Crossing, count: int, each: MapFunction
) -> DrawnCrossing:
    profile, row = _asked(plan, (crossing.low, *crossing.row))[0].hardware, _signed(found, crossing.row)
    drawn = draws(profile, count, runs=[result for cell in row for result in cell.results])
    profiles = [drawn_profile(profile, draw) for draw in drawn]
    ends = [cell for cell in row if cell.place[0] in (crossing.low, crossing.high)]
    rows = _under(plan, ends, profiles, each)
    effects = [sum(cell.delta or 0.0 for cell in cells) for cells in rows]
    moved = [n for n, cells in enumerate(rows) if crossings(plan, cells) != (crossing,)]
    others = [cell for cell in row if cell not in ends]
    for n, cells in zip(moved, _under(plan, others, [profiles[n] for n in moved], each), strict=True):
        rows[n] = sorted((*rows[n], *cells), key=lambda cell: _place(plan, cell.place[0]))
    places = [place for cells in rows if (place := _nearest(plan, cells, crossing)) is not None]
    low, high = (
        pick((getattr(place, end) for place in (crossing, *places)), key=lambda value: _place(plan, value))
        for pick, end in ((min, "low"), (max, "high"))
    )
    return DrawnCrossing(len(drawn), len(places), low, high, *followed(effects, drawn))


def _under(plan: SweepPlan, cells: Sequence[Cell], profiles: Profiles, each: MapFunction) -> list[list[Cell]]:
    """The cells on each of the profiles."""
    asked = (zip(_asked(plan, cell.place), cell.results, strict=True) for cell in cells)
    runs = [[run_each(each, *one, profiles) for one in of_cell] for of_cell in asked]
    sides = [list(zip(*side, strict=True)) for side in runs]
    return [
        [answered(plan, cell.place, results[number]) for cell, results in zip(cells, sides, strict=True)]
        for number in range(len(profiles))
    ]


def _nearest(plan: SweepPlan, cells: Sequence[Cell], crossing: Crossing) -> Crossing | None:
    """The change to the same side that is closest to the crossing."""
    same = [found for found in crossings(plan, cells) if found.tone == crossing.tone]
    here = _place(plan, crossing.low)
    return min(same, key=lambda found: abs(_place(plan, found.low) - here), default=None)


def _place(plan: SweepPlan, value: str) -> int:
    return plan.axes[0].values.index(value)


def document(plan: SweepPlan, found: Sequence[Cell], drawn: DrawnCrossings, *, run: Document) -> Document:
    """``run`` is the result document's ``run`` of the whole sweep; ``found`` may have fewer cells than the plan."""
    first = next((cell for cell in found if cell.values), None)
    reading = first.values[0] if first else None
    ran = [labels for cell in found for labels in cell.labels]
    kinds = {
        key: " and ".join(sorted({getattr(one, key) for one in ran} - {None}))
        for key in ("host", "acceptance")
    }
    content = {
        "schema_version": SCHEMA_VERSION,
        "tool": tool().model_dump(mode="json"),
        "run": run,
        "environment": environment(),
        "labels": ran[0].model_dump(mode="json") | kinds if ran else None,
        "hardware": sorted({name for cell in found for name in cell.hardware}),
        "scenario": {"name": plan.scenario, "overrides": list(plan.overrides)},
        "sweep": {
            "metric": plan.metric,
            "unit": reading and reading.unit,
            "direction": reading and reading.direction,
            "exact": all(labels.exact for labels in ran) if ran else None,
            "min_effect_pct": MIN_EFFECT,
            "not_drawn": drawn.abstained or None,
            "axes": [axis._asdict() | {"values": list(axis.values)} for axis in plan.axes],
            "sides": [{"label": side.label, "overrides": list(side.overrides)} for side in plan.sides],
        },
        "cells": [_cell(cell) for cell in found],
        "break_even": [
            _crossing(plan, found, crossing, drawn.found.get(crossing)) for crossing in crossings(plan, found)
        ],
    }
    return content | {"conclusion": sweep_conclusion(content)}


def _cell(cell: Cell) -> Document:
    delta = cell.delta
    return {
        "at": list(cell.place),
        "values": [value.value for value in cell.values],
        "delta_pct": delta if delta is not None and math.isfinite(delta) else None,
        "candidate": cell.tone,
        "tokens": cell.tokens,
        "refused": cell.refusal or None,
        "remark": cell.remark or None,
        "results": list(cell.files),
    }


def _crossing(
    plan: SweepPlan, found: Sequence[Cell], crossing: Crossing, drawn: DrawnCrossing | None
) -> Document:
    """``slight``: beyond it no difference to its side reaches the smallest effect of interest."""
    here = _place(plan, crossing.high)
    beyond = [cell.tone for cell in _signed(found, crossing.row) if _place(plan, cell.place[0]) >= here]
    return {
        "key": plan.axes[0].key,
        "at": dict(zip((axis.key for axis in plan.axes[1:]), crossing.row, strict=True)),
        "between": [crossing.low, crossing.high],
        "beyond": crossing.tone,
        "slight": crossing.tone not in beyond,
        "drawn": drawn and {**drawn._asdict(), "stands": drawn.stands},
    }
