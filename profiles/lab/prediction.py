"""The error of emulated times against measured ones, by metric, and whether both show the same changes between states.

Each result is a single run, so that a difference between two states counts only beyond ``CALLED``. For statistics over
repeated runs see ``compare``.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from ..record.files import write_whole
from ..record.result import Metric, Result, read

Document = dict[str, Any]

METRICS: Final = (
    "step_ms",
    "output_throughput",
    "ttft_ms",
    "tpot_ms",
    "forward_occupancy",
    "exposed_stall_us_per_step",
)
GOAL: Final = 0.05  # of the median error
CALLED: Final = 0.02  # the least relative difference that counts as a change
HOST_TIMES: Final = "host_us_per_step"  # by range, in a result's environment
# In the metric's unit. Where both values are below it there is no error, and a difference from 0 may not be above it.
_NOISE: Final = {"exposed_stall_us_per_step": 1.0}


class Pair(NamedTuple):
    """One scenario with one relay state, on the virtual GPU and on a real one."""

    scenario: str
    state: str
    emulated: Result
    measured: Result


def prediction(pairs: Iterable[Pair], *, missing: Sequence[str] = ()) -> Document:
    """The document: errors and changes, their summary, and ``findings``: why the goal is missed, empty where it is
    reached. ``pairs`` in the order of the ladder: a change is from one to the next of the same scenario. ``missing``:
    pairs that there are no two runs of."""
    pairs = list(pairs)
    errors = [_error(pair, name) for pair in pairs for name in METRICS]
    neighbours = (two for two in pairwise(pairs) if two[0].scenario == two[1].scenario)
    changes = [change for before, after in neighbours for change in _changes(before, after)]
    sizes: defaultdict[str, list[float]] = defaultdict(list)
    for row in errors:
        if row["error"] is not None:
            sizes[row["scenario"]].append(abs(row["error"]))
    error = median(chain.from_iterable(sizes.values())) if sizes else None
    against_zero = sum(row["absolute"] is not None for row in errors)
    one_sided = sum((row["emulated"] is None) != (row["measured"] is None) for row in errors)
    signs = sum(change["agree"] is False for change in changes)
    causes = {
        "nothing was compared": error is None and not (against_zero or one_sided),
        f"median error {100 * (error or 0):.1f} %, goal below {100 * GOAL:.1f} %": (error or 0) >= GOAL,
        f"signs of changes that differ: {signs}": signs,
        f"errors where 0 was measured: {against_zero}": against_zero,
        f"metrics of one side only: {one_sided}": one_sided,
        f"not run: {', '.join(missing)}": missing,
    }
    return {
        "median_error": error,
        "by_scenario": {scenario: median(found) for scenario, found in sizes.items()},
        "goal": GOAL,
        "called_from": CALLED,
        "findings": [cause for cause, applies in causes.items() if applies],
        "errors": errors,
        "changes": changes,
        "host_us_per_step": [row for pair in pairs for row in _host_times(pair)],
    }


def _host_times(pair: Pair) -> list[Document]:
    """The host's time in each range on both sides, the largest difference first. The rows show which part of a step
    causes an error."""
    sides: list[Any] = [side.environment.get(HOST_TIMES, {}) for side in (pair.emulated, pair.measured)]
    emulated, measured = sides
    rows = [
        {"scenario": pair.scenario, "state": pair.state, "range": name}
        | {"emulated": emulated.get(name, 0.0), "measured": measured.get(name, 0.0)}
        for name in {**emulated, **measured}
    ]
    return sorted(rows, key=lambda row: -abs(row["emulated"] - row["measured"]))


def _error(pair: Pair, name: str) -> Document:
    """``error``: (emulated - measured) / measured; None where either side has no value, or both are negligible.
    ``absolute``: emulated - measured in the metric's unit, where 0 was measured and the difference is not negligible.
    """
    emulated, measured = _value(pair.emulated, name), _value(pair.measured, name)
    relative = absolute = None
    if emulated is not None and measured is not None and max(emulated, measured) > _NOISE.get(name, 0):
        if measured:
            relative = (emulated - measured) / measured
        else:
            absolute = emulated - measured
    metric = pair.emulated.metrics.get(name)
    return {
        "scenario": pair.scenario,
        "state": pair.state,
        "metric": name,
        "unit": metric.unit if isinstance(metric, Metric) else "",
        "emulated": emulated,
        "measured": measured,
        "error": relative,
        "absolute": absolute,
    }


def _value(result: Result, name: str) -> float | None:
    """The median of a distribution, the value of what is a single one."""
    metric = result.metrics.get(name)
    p50 = getattr(metric, "p50", None)
    return p50 if isinstance(p50, (int, float)) else getattr(metric, "value", None)


def _changes(before: Pair, after: Pair) -> Iterator[Document]:
    """The relative changes from one state to the next; None where the value before it is 0. ``agree``: the signs agree;
    None unless both sides changed."""
    results = (before.emulated, after.emulated, before.measured, after.measured)
    for name in METRICS:
        values = [value for result in results if (value := _value(result, name)) is not None]
        if len(values) < len(results):
            continue
        sides = (values[0], values[1]), (values[2], values[3])
        directions = [_direction(name, *side) for side in sides]
        emulated, measured = ((y - x) / x if x else None for x, y in sides)
        yield {
            "scenario": after.scenario,
            "before": before.state,
            "after": after.state,
            "metric": name,
            "emulated": emulated,
            "measured": measured,
            "agree": directions[0] == directions[1] if all(directions) else None,
        }


def _direction(name: str, before: float, after: float) -> int:
    """1 or -1 for a change that counts, 0 otherwise."""
    if max(before, after) <= _NOISE.get(name, 0) or abs(after - before) < CALLED * before:
        return 0
    return (after > before) - (after < before)


def file(question: str, side: str) -> str:
    """The name of the result of ``scenario:state``; ``side`` is emulated or measured."""
    return f"prediction-{question.replace(':', '-')}-{side}.json"


def gathered(folder: Path, questions: Iterable[str]) -> tuple[list[Pair], list[str]]:
    """The pairs whose two runs lie in ``folder``, and the names of those that do not."""
    pairs, missing = [], []
    for question in questions:
        paths = [folder / file(question, side) for side in ("emulated", "measured")]
        if all(path.exists() for path in paths):
            scenario, _, state = question.partition(":")
            pairs.append(Pair(scenario, state, *map(read, paths)))
        else:
            missing.append(question.replace(":", " "))
    return pairs, missing


def main(arguments: Sequence[str]) -> int:
    """``FOLDER SCENARIO:STATE...``: writes prediction.json; returns 1 if the goal is missed or a pair of runs is
    missing."""
    folder = Path(arguments[0])
    pairs, missing = gathered(folder, arguments[1:])
    content = prediction(pairs, missing=missing)
    write_whole(folder / "prediction.json", json.dumps(content, indent=1) + "\n")
    print("; ".join(content["findings"]) or "the goal is reached")
    return 1 if content["findings"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
