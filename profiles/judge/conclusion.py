"""The comparison in one line that its author could defend in review."""

from __future__ import annotations

from typing import Final

from .compare import Comparison
from .divergence import Divergence
from .effects import Count
from .engagement import Engagement
from .verdict import Judgement, Reason

_PLAIN: Final = frozenset({"h2d", "d2h", "sync"})
_SHOWN: Final = 3  # counts
_TITLES: Final = {"output_throughput": "output throughput", "ttft_ms": "TTFT", "tpot_ms": "TPOT"}


def conclusion(found: Comparison, *, a: str, b: str) -> str:
    """``a`` and ``b`` are the sides' labels."""
    parts = [_verdict(found), _metrics(found), _tokens(found), _engagement(found.engagement), _counts(found)]
    if Reason.OUTPUT_DIFF in found.reasons:  # how fast the wrong answer came is nobody's business
        parts = [_verdict(found), _tokens(found)]
    text = "; ".join(part for part in parts if part)
    return f"{b} against {a} on {_setting(found)}: {text}."


def _setting(found: Comparison) -> str:
    result = found.trials.a[0].result
    n = len(found.trials.a)
    runs = {
        "seeds": f"{n} seed{'s' if n != 1 else ''}",
        "blocks": f"{n} pairs",
        "stored": f"{n} and {len(found.trials.b)} stored runs",
    }
    kind = "emulated" if result.labels.emulated else "measured"
    name = result.scenario.expanded.get("name", "a scenario")
    return f"{name} ({kind} {result.hardware.name}, {runs[found.trials.design]})"


def _verdict(found: Comparison) -> str:
    return f"{found.verdict}: {', '.join(found.reasons)}" if found.reasons else found.verdict


def _metrics(found: Comparison) -> str:
    if found.metrics and all(judged.values_a == judged.values_b for judged in found.metrics.values()):
        return "every metric equal to the last digit"
    shown = [(name, found.metrics[name].judgement) for name in found.headline if name in found.metrics]
    return ", ".join(f"{_TITLES.get(name, name)} {_effect(judged)}" for name, judged in shown)


def _effect(judged: Judgement) -> str:
    return f"{judged.delta:+.2f} % [{judged.interval.low:+.2f}, {judged.interval.high:+.2f}]"


def _tokens(found: Comparison) -> str:
    if found.trials.divergence is None:
        return (
            f"tokens {found.trials.tokens}"
            if found.trials.tokens == "equal"
            else f"tokens: {found.trials.tokens}"
        )
    return f"tokens differ, {divergence_text(found.trials.divergence)}"


def divergence_text(where: Divergence) -> str:
    """Which request, position and step came first, and what each side said."""
    if where.request is None:
        return f"first with seed {where.seed}; the tokens themselves were not kept or are equal (damaged KV)"
    steps = " and ".join(str(step) for step in (where.step_a, where.step_b) if step is not None)
    said = ["the end" if token is None else str(token) for token in (where.token_a, where.token_b)]
    margins = " and ".join(f"{m:.3g}" for m in (where.margin_a, where.margin_b) if m is not None)
    return (
        f"first with seed {where.seed} in request {where.request} at position {where.position}"
        f" (step {steps or 'unknown'}): A says {said[0]} and B {said[1]}, margin {margins or 'unknown'}"
    )


def _engagement(found: Engagement) -> str:
    differing, steps = found.engaged
    everything = sum(share.steps for share in found.kinds.values())
    if not differing:
        what = "copies and syncs" if found.basis == "totals" else "device operations"
        return f"the same {what} in all {everything:,} steps"
    kinds = " and ".join(kind for kind, share in found.kinds.items() if share.differing)
    exactly = "" if found.basis == "steps" or differing == steps else "about "
    return f"engaged in {exactly}{differing:,.0f} of {steps:,} {kinds} steps ({found.percent:.1f} %)"


def _counts(found: Comparison) -> str:
    """The largest changes per step, those of steady decodes told as decodes."""
    changed = [
        count
        for count in found.counts
        if count.counter in _PLAIN and "." not in count.kind and count.a.mean != count.b.mean
    ]
    changed.sort(key=lambda count: -abs(count.b.mean - count.a.mean))
    if not changed:
        return "copies and syncs per step equal"
    more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return "per step " + ", ".join(map(_count, changed[:_SHOWN])) + more


def _count(count: Count) -> str:
    return f"{count.kind} {count.stream} {count.counter} {count.a.mean:.4g} -> {count.b.mean:.4g}"
