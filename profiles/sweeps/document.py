"""A sweep as a versioned document: the axes, every cell, and where the sign changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from ..record.environment import environment, tool
from .break_even import Crossing, DrawnCrossing, DrawnCrossings, crossings
from .conclusion import sweep_conclusion
from .sweep import Cell, SweepPlan

# History: 1.0 the first; 1.1 repeats break-evens under draws of the hardware's constants; 1.2 has a
# conclusion.
SCHEMA_VERSION: Final = "1.2"

Document = dict[str, Any]


def document(plan: SweepPlan, found: Sequence[Cell], drawn: DrawnCrossings, *, run: Document) -> Document:
    """``run`` is the result document's ``run`` of the whole sweep; ``found`` may have fewer cells than the plan."""
    first = next((cell for cell in found if cell.values), None)
    reading = first.values[0] if first else None
    labels = first.results[0].labels if first and first.results else None
    content = {
        "schema_version": SCHEMA_VERSION,
        "tool": tool().model_dump(mode="json"),
        "run": run,
        "environment": environment(),
        "labels": labels and labels.model_dump(mode="json"),
        "scenario": {"name": plan.scenario, "overrides": list(plan.overrides)},
        "sweep": {
            "metric": plan.metric,
            "unit": reading and reading.unit,
            "direction": reading and reading.direction,
            "exact": labels and labels.exact,
            "not_drawn": drawn.abstained or None,
            "axes": [axis._asdict() | {"values": list(axis.values)} for axis in plan.axes],
            "sides": [{"label": side.label, "overrides": list(side.overrides)} for side in plan.sides],
        },
        "cells": [_cell(cell) for cell in found],
        "break_even": [
            _crossing(plan, crossing, drawn.found.get(crossing)) for crossing in crossings(plan, found)
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
        "results": list(cell.files),
    }


def _crossing(plan: SweepPlan, crossing: Crossing, drawn: DrawnCrossing | None) -> Document:
    return {
        "key": plan.axes[0].key,
        "at": dict(zip((axis.key for axis in plan.axes[1:]), crossing.row, strict=True)),
        "between": [crossing.low, crossing.high],
        "beyond": crossing.tone,
        "drawn": drawn and {**drawn._asdict(), "stands": drawn.stands},
    }
