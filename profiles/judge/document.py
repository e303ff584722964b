"""The comparison as a versioned document: the two sides, the design, every value, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, Final

from pydantic_core import to_jsonable_python

from ...scenarios.schema import Case
from ..record.environment import environment, tool
from ..record.result import Abstained, Result
from .compare import Comparison
from .conclusion import RUNS, conclusion, titles
from .engagement import StepEngagement
from .reasons import Reason
from .verdict import Judgement

# History: 1.0 the first; 1.1 adds draws of the hardware's constants, and gates are undecided instead of inconclusive;
# 1.2 has the conclusion where every document has it, what B adds to every step, and whether seeds are one run; 1.3
# says whether the comparison passed.
SCHEMA_VERSION: Final = "1.3"

Document = dict[str, Any]


def document(found: Comparison, *, a: str, b: str, run: Document, case: Case | None = None) -> Document:
    """``a`` and ``b`` are the sides' labels; ``run`` is the result document's ``run`` of the whole comparison;
    ``case`` is the reported change that was compared, if any."""
    first, divergence = found.trials.a[0].result, found.trials.divergence
    content = {
        "schema_version": SCHEMA_VERSION,
        "tool": tool(),
        "run": run,
        "environment": environment() if first.labels.emulated else first.environment,
        "labels": first.labels,
        "hardware": first.hardware,
        "scenario": {"name": first.scenario.expanded.get("name"), "expanded": first.scenario.expanded},
        "conclusion": conclusion(found, a=a, b=b),
        "comparison": {
            "baseline": _side(a, found.trials.results[0]),
            "candidate": _side(b, found.trials.results[1]),
            "design": found.trials.design,
            "pairs": min(len(found.trials.a), len(found.trials.b)),
            "verdict": found.verdict,
            "passed": not found.broken,
            "reasons": found.reasons,
            "headline": found.headline,
            # What differs and is allowed to: the engine's settings, and environments that cannot matter.
            "comparability": {
                "ok": True,
                "differences": [difference._asdict() for difference in (*found.engine, *found.environment)],
            },
            "tokens": {"verdict": found.trials.tokens, "divergence": divergence and divergence._asdict()},
            "engagement": _engagement(found.engagement, found.rules.min_engagement),
            "metrics": {name: _metric(judged) for name, judged in found.metrics.items()},
            "counts": [count._asdict() for count in found.counts],
            "added": [one._asdict() for one in found.added],
            "one_run": found.trials.one_run,
            "lines": [line._asdict() for line in found.lines],
            "hazards": found.hazards,
            "watched": not any(
                isinstance(x.hazards, Abstained) for runs in found.trials.results for x in runs
            ),
            "idle": found.idle,
            "gates": [gate._asdict() for gate in found.gates],
            "draws": {"count": len(found.drawn.draws), "abstained": found.drawn.abstained or None},
            "hint": hint(found),
            "case": case,
        },
    }
    plain: Document = to_jsonable_python(content)
    return plain


def hint(found: Comparison) -> str | None:
    """What would allow a verdict: a question whose tokens do not follow from times, or, where too few runs or their
    spread prevented one, the number of runs."""
    first = found.trials.a[0].result
    expanded: Any = first.scenario.expanded
    temperature = expanded.get("workload", {}).get("sampling", {}).get("temperature")
    if Reason.OUTPUT_DIFF in found.reasons and first.labels.engine is not None and temperature:
        return (
            "the engine draws tokens by a sampler of its own, in the order of its batches, so that other times may"
            " alone give other tokens; --set workload.sampling.temperature=0 compares tokens that they cannot change"
        )
    open_metrics = {name: found.metrics[name] for name in found.headline if name in found.metrics}
    wanting = {name: one for name, one in open_metrics.items() if one.reasons == (Reason.LOW_N,)}
    known = {name: one.needed - one.n for name, one in wanting.items() if one.needed is not None}
    said, runs = [], RUNS[found.trials.design]
    if known:
        name = max(known, key=lambda metric: known[metric])
        spent = known[name] * 2 * fmean(x.run.wall_s for results in found.trials.results for x in results)
        minutes = max(round(spent / 60), 1)
        worst, time = wanting[name], f"about {minutes} minute{'s' * (minutes > 1)}"
        instead = f"{worst.needed} {runs} instead of {worst.n}"
        said.append(
            f"a verdict on {titles(known)} needs at least {instead}, if they spread alike"
            if worst.resolve is None
            else f"{instead}, {time} more, would resolve {worst.resolve:g} % of {titles([name])}"
        )
    never = titles(name for name in wanting if name not in known)
    least = f"{found.rules.min_effect:g} %, the smallest effect of interest"
    said += [f"more {runs} would hardly decide {never}, which changes by about {least}"] * bool(never)
    return "; ".join(said) or None


def _side(label: str, results: Sequence[Result]) -> Document:
    first = results[0]
    idle = (first.ranks or (first,))[0].idle
    return {
        "label": label,
        "tool": first.tool,
        "relay": first.relay,
        "capture": first.environment.get("capture") if first.labels.capture else None,
        "engine": first.labels.engine,
        "world": first.labels.world,
        "unrecorded": next((result.unrecorded for result in results if result.unrecorded), None),
        "idle_abstained": idle.abstained if isinstance(idle, Abstained) else None,
        "runs": [
            {
                "id": result.run.id,
                "seed": result.scenario.seed,
                "scenario_sha256": result.scenario.sha256,
                "outputs": result.outputs,
            }
            for result in results
        ],
    }


def _engagement(found: StepEngagement, threshold: float) -> Document:
    return {
        "basis": found.basis,
        "threshold_pct": threshold,
        "percent": found.percent,
        "kinds": {kind: share._asdict() for kind, share in found.kinds.items()},
    }


def _metric(found: Judgement) -> Document:
    return {
        "unit": found.unit,
        "direction": found.direction,
        "a": median(found.a),
        "b": median(found.b),
        "values": {"a": found.a, "b": found.b},
        "delta_pct": _finite(found.delta),
        "ci_low": _finite(found.interval.low),
        "ci_high": _finite(found.interval.high),
        "n": found.n,
        "test": found.test,
        "p_value": found.p_value,
        "min_effect_pct": found.min_effect,
        "noise_floor_pct": found.floor,
        "slot_order_pct": found.slot,
        "drift_pct": found.drift,
        "pairs_needed": found.needed,
        "verdict": found.verdict,
        "reasons": found.reasons,
        "firmness": found.firmness,
    }


def _finite(value: float) -> float | None:
    """None for a percentage of zero."""
    return value if math.isfinite(value) else None
