"""The comparison in one sentence."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, Final

from ..record.conclusion import attributed, listed, number_of, numbers
from ..record.result import STREAM_WAIT, Abstained
from .compare import INTEREST, Comparison, same_times, shows_change
from .effects import ADDABLE
from .engagement import THRESHOLD
from .likeness import Divergence, other_ends
from .reasons import Reason
from .trials import shortfalls
from .verdict import MIN_SEEDS, Judgement

_SHOWN: Final = 3  # counts
# Counters of copies by the host's memory, and of work that stays on the device.
_DETAILS: Final = ("h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable", "d2d", "kernel")
_ADDED: Final = {"sync": "blocking sync", "h2d": "upload", "d2h": "download"}
_DECODING: Final = ("decode", "verify")  # kinds of steps that make the tokens behind the first
_DECIDED: Final = ("no change", "better", "worse")
RUNS: Final = {"seeds": "seeds", "blocks": "pairs", "stored": "runs of each side"}  # by design
_SCHEDULING: Final = {"queue_ms": "time in the queue", "retractions": "retractions"}
_TITLES: Final = {"output_throughput": "output throughput", "ttft_ms": "TTFT", "tpot_ms": "TPOT"}


def conclusion(found: Comparison, *, a: str, b: str) -> str:
    """``a`` and ``b`` are the sides' labels."""
    said = "; ".join(filter(None, (_hazards(found), _added(found))))
    verdict = f"{_verdict(found)}{' here' if said and found.verdict == 'no change' else ''}"
    of_all = (_metrics, _worth, _tokens, _engagement, _scheduling, _counts, _fewer_waits)
    parts = [said, verdict, *(part(found) for part in of_all)]
    if Reason.NOT_ENGAGED in found.reasons:
        counts = _counts(found) if found.engagement.engaged.differing else ""
        beside = (part(found) for part in (_beside_counts, _metrics, _tokens))
        parts = [said, f"{verdict}, {_engagement(found)}", *beside, counts]
    if Reason.OUTPUT_DIFF in found.reasons:  # metrics of different work cannot be compared
        parts = [_hazards(found), _verdict(found), _tokens(found)]
    return f"{b} against {a} on {_setting(found)}: {'; '.join(filter(None, (*parts, _watched(found))))}."


def cases_conclusion(documents: Mapping[str, dict[str, Any]], *, of: int, interrupted: bool) -> str:
    """Of the comparisons of cases, by name: how many are found as expected, and what the others are instead; and after
    how many ``of`` all cases the user interrupted them, where that is so."""
    found = {name: document["comparison"] for name, document in documents.items()}
    others = [
        f"{name} is {': '.join([one['verdict'], *one['reasons'][:1]])}, expected {one['case']['expect']}"
        for name, one in found.items()
        if one["verdict"] != one["case"]["expect"]
    ]
    said = f"{len(found) - len(others)} of {len(found)} reported changes are found as expected"
    others += [f"interrupted after {len(found)} of {of} cases"] * interrupted
    return f"{'; '.join((said, *others))}."


def _hazards(found: Comparison) -> str:
    if not found.hazards:
        return ""
    first, several = found.hazards[0], f"{len(found.hazards)} hazards that A has not, the first: "
    return f"{several if len(found.hazards) > 1 else '1 hazard that A has not: '}{first.resource}: {first.missing}"


def _watched(found: Comparison) -> str:
    unwatched = [any(isinstance(one.hazards, Abstained) for one in side) for side in found.trials.results]
    return "" if unwatched[0] is unwatched[1] else f"only {'BA'[unwatched[1]]} was watched for hazards"


def _added(found: Comparison) -> str:
    """The copies and syncs that B's steps have and A's have not, by their averages."""
    kinds = defaultdict(list)
    for one in found.added:
        number = f"{round(one.mean, 2) or float(f'{one.mean:.1g}'):g}"
        kinds[one.kind].append(f"{number} {_ADDED[one.counter]}{'s' * (number != '1')}")
    words = [f"{' and '.join(counts)} per {kind} step" for kind, counts in kinds.items()]
    return f"adds {listed(words, _SHOWN)}" if words else ""


def _worth(found: Comparison) -> str:
    """The line that accounts for most of the change of throughput, where that was computed and the sign is known."""
    judged = found.metrics.get("output_throughput")
    if judged is None or judged.interval.low <= 0 <= judged.interval.high:
        return ""
    sited = [line for line in found.lines if line.site]
    rows = [{"site": line.site.model_dump(), "worth_pct": line.worth_pct} for line in sited if line.site]
    source = attributed(judged.delta, rows)
    return f"of the {judged.delta:+.2f} %, {source}" if source else ""


def _setting(found: Comparison) -> str:
    result = found.trials.a[0].result
    n = len(found.trials.a)
    runs = {
        "seeds": "one run" if found.trials.one_run else number_of(n, "seed"),
        "blocks": f"{number_of(n, 'pair')}, {number_of(n // 2, 'seed')}",
        "stored": f"{n} and {number_of(len(found.trials.b), 'stored run')}, drift between them counts",
    }
    kind = numbers(result.labels.model_dump(), result.hardware.name)
    name = result.scenario.expanded.get("name", "a scenario")
    return f"{name} ({kind}, {runs[found.trials.design]})"


def _verdict(found: Comparison) -> str:
    """Where some metrics have a verdict and others have none, which ones."""
    if not found.reasons:
        gated = found.headline if any(gate.name in found.headline for gate in found.rules.gates) else ()
        which = f" by the gated metric{'s' * (len(gated) > 1)} {titles(gated)}"
        return f"{found.verdict}{which if gated else ''}{_contrary(found)}"
    named: defaultdict[str, list[str]] = defaultdict(list)
    for name in found.headline:
        if name in found.metrics:
            named[found.metrics[name].verdict].append(name)
    undecided = ", ".join(found.reasons)
    if len(named) < 2:
        return f"{found.verdict}: {undecided}"
    names = {verdict: titles(those) for verdict, those in named.items()}
    said = [f"{verdict} in {names[verdict]}" for verdict in _DECIDED if verdict in names]
    return f"{', '.join(said)}; inconclusive in {names['inconclusive']}: {undecided}{_spread(found)}"


def _contrary(found: Comparison) -> str:
    """Metrics with the other sign, which are too small for a trade-off."""
    other = {"better": "worse", "worse": "better"}.get(found.verdict)
    metrics = found.metrics
    names = [name for name in found.headline if name in metrics and metrics[name].verdict == other]
    return f", though {titles(names)} {other} by less than {INTEREST:g} %" if names else ""


def titles(names: Iterable[str]) -> str:
    return " and ".join(_TITLES.get(name, name) for name in names)


def _spread(found: Comparison) -> str:
    """The least obvious of the reasons, in the terms of this comparison."""
    if found.reasons != (Reason.LOW_N,) or found.trials.design != "seeds":
        return ""
    if len(found.trials.a) < MIN_SEEDS:
        return f", which needs {MIN_SEEDS} seeds"
    least = f"{found.rules.min_effect:g} %, the smallest effect of interest"
    return f", by the spread over seeds the change is neither surely within {least}, nor surely beyond it"


def _metrics(found: Comparison) -> str:
    """Metrics with the verdict of the comparison come first, those without a verdict last."""
    if found.metrics and all(judged.a == judged.b for judged in found.metrics.values()):
        return "every metric equal to the last digit"
    shown: defaultdict[bool, list[str]] = defaultdict(list)
    judged = [(name, found.metrics[name]) for name in found.headline if name in found.metrics]
    for name, one in sorted(judged, key=lambda entry: entry[1].verdict != found.verdict):
        shown[one.verdict == "inconclusive"].append(f"{_TITLES.get(name, name)} {_effect(one)}")
    return "; undecided: ".join(", ".join(shown[undecided]) for undecided in sorted(shown))


def _effect(judged: Judgement) -> str:
    low, high = judged.interval
    if not math.isfinite(judged.delta):
        return f"{median(judged.a):.3g} -> {median(judged.b):.3g} {judged.unit}"
    text = f"{judged.delta:+.2f} %" + (f" [{low:+.2f}, {high:+.2f}]" if judged.n > 1 else "")
    return text if judged.firmness is None else f"{text} ({firmness_text(judged)})"


def firmness_text(judged: Judgement) -> str:
    """In how many draws of the hardware's constants the sign holds, between which effects, and what decides it."""
    found = judged.firmness
    if found is None:
        return ""
    if isinstance(found, Abstained):
        return found.abstained
    text = f"{found.holding} of {found.draws} draws, {found.low:+.2f} … {found.high:+.2f} %"
    decided = Reason.CONSTANTS in judged.reasons and found.constant
    return f"{text}; follows {found.constant}, rank correlation {found.correlation:+.2f}" if decided else text


def _tokens(found: Comparison) -> str:
    """Whether tokens and ends are the same, and which requests were not served."""
    pairs = zip(*found.trials.results, strict=False)
    ends = [text for a, b in pairs if a.scenario.seed == b.scenario.seed for _, text in other_ends(b, a)]
    ended = listed(ends, 1)
    said = [f"tokens equal, but {ended}" if ended else "tokens equal"]
    if found.trials.divergence is not None:
        said = [divergence_text(found.trials.divergence), ended]
    elif found.trials.tokens != "equal":
        said = [f"tokens: {found.trials.tokens}"]
    lost = shortfalls([*zip("AB", found.trials.results, strict=True)])
    return "; ".join(filter(None, (*said, lost)))


def divergence_text(where: Divergence) -> str:
    """That tokens differ, with the request, position and step of the first difference, and the token of each side; or
    what differs beside tokens."""
    if where.request is None:
        return f"outputs differ, first with seed {where.seed}: {where.beside}"
    steps = " and ".join(str(step) for step in (where.step_a, where.step_b) if step is not None)
    tokens = ["the end" if token is None else str(token) for token in (where.token_a, where.token_b)]
    margins = " and ".join(f"{m:.3g}" for m in (where.margin_a, where.margin_b) if m is not None)
    return (
        f"tokens differ, first with seed {where.seed} in request {where.request} at position {where.position}"
        f" (step {steps or 'unknown'}): A says {tokens[0]} and B {tokens[1]}, margin {margins or 'unknown'}"
    )


def _engagement(comparison: Comparison) -> str:
    found = comparison.engagement
    if found.basis == "nothing":
        return "which steps differ is not known, source lines were not recorded"
    differing, steps = found.engaged
    if not differing:
        same = _same(comparison, sum(share.steps for share in found.kinds.values()))
        measured = "" if comparison.trials.a[0].exact else "host work, "
        how = f"engaged by {measured}order, waits or batches alone: "
        alone = shows_change(comparison.metrics, comparison.headline) or not same_times(comparison.trials)
        return f"{how if alone else ''}{same}"
    kinds = " and ".join(kind for kind, share in found.kinds.items() if share.differing)
    exactly = "" if found.basis == "steps" or differing == steps else "about "
    where = f"{differing:,.0f} of {steps:,} {kinds} steps"
    return f"engaged in {exactly}{where} ({found.percent:.1f} %){_between_tokens(comparison)}"


def _scheduling(found: Comparison) -> str:
    """What a policy of admission or retraction changes, where the steps that make tokens do nothing else."""
    kinds = found.engagement.kinds
    if any(kinds[kind].percent >= THRESHOLD for kind in _DECODING if kind in kinds):
        return ""
    judged = [(title, found.metrics[name]) for name, title in _SCHEDULING.items() if name in found.metrics]
    changed = [f"{title} {_effect(one)}" for title, one in judged if one.verdict in ("better", "worse")]
    return ", ".join(changed)


def _between_tokens(comparison: Comparison) -> str:
    """How TPOT can change although next to none of the steps that make tokens do anything else."""
    judged = comparison.metrics.get("tpot_ms") if "tpot_ms" in comparison.headline else None
    kinds = comparison.engagement.kinds
    same = {kind: kinds[kind] for kind in _DECODING if kind in kinds and kinds[kind].percent < THRESHOLD}
    steps = sum(share.steps for share in same.values())
    differing = sum(share.differing for share in same.values())
    if judged is None or judged.verdict not in ("better", "worse") or not steps:
        return ""
    which = f"{' and '.join(same)} steps"
    others = " and ".join(kind for kind, share in kinds.items() if share.differing and kind not in same)
    few = f"about {differing:,.0f} of the {steps:,} {which} are among them"
    said = few if differing else _same(comparison, steps, which)
    return f"; {said}, but TPOT includes the {others} steps and the idle time between two tokens"


def _same(found: Comparison, steps: int, which: str = "steps") -> str:
    if found.engagement.basis == "totals":
        return f"as many copies and syncs in all {steps:,} {which}"
    if found.engagement.basis == "kinds":
        return f"the {steps:,} {which} differ in no more than their batches explain"
    return f"as many device operations of each kind in all {steps:,} {which}"


def _beside_counts(found: Comparison) -> str:
    """Whether anything differs that is not counted. Engines of other projects have the same source where its digests
    are equal, whatever it is called."""
    a, b = (side[0].result for side in (found.trials.a, found.trials.b))
    digests = [side.labels.engine.sha256 for side in (a, b) if side.labels.engine is not None]
    if len(digests) == 2 and digests[0] == digests[1]:
        return "A and B have the same source"
    if not found.engine:
        return "A and B are the same engine" if a.tool == b.tool and a.labels.capture is None else ""
    if any(difference.key.startswith("labels.engine.") for difference in found.engine):
        host = ", and --set device.host=measured the host's own work" * a.labels.exact
        return f"their sources differ: check judges order and values, which are not counted{host}"
    return ""


def _counts(found: Comparison) -> str:
    """The largest changes per step. Steady decodes are among the decodes. Where the median steps have as many copies
    between host and device and as many syncs, the host's memory of the copies and what else they do on the device come
    first."""
    changed = [
        (count, count.a, count.b)
        for count in found.counts
        if count.a and count.b and count.a.mean != count.b.mean and "." not in count.kind
    ]
    changed.sort(key=lambda entry: -abs(entry[2].mean - entry[1].mean))
    counts = [entry for entry in changed if entry[0].counter in ADDABLE]
    if all(a.median == b.median for _, a, b in counts):
        medians = [entry for entry in changed if entry[1].median != entry[2].median]
        counts = [entry for entry in medians if entry[0].counter in _DETAILS] + counts
    if not counts:
        alone = any(count.change == "no steps" and "." not in count.kind for count in found.counts)
        which = " of the kinds of steps that both have" if alone else ""
        same = "equal" if found.counts else "not recorded"
        return f"copies and syncs per step {same}{which}{_uncounted(found)}"
    means = [
        (f"{one.kind} {one.stream} {one.counter}", f"{a.mean:.4g}", f"{b.mean:.4g}") for one, a, b in counts
    ]
    shown = [f"{what} {a} -> {b}" for what, a, b in means if a != b]
    said = f"per step {listed(shown, _SHOWN)}" if shown else "copies and syncs per step equal to four digits"
    return f"{said}{_uncounted(found)}"


def _fewer_waits(found: Comparison) -> str:
    """How many waits of streams A's steps have and B's have not: without one, data may be read too early."""
    fewer: defaultdict[str, float] = defaultdict(float)
    for line in found.lines:
        if line.what == STREAM_WAIT and line.a is not None and line.b is not None:
            fewer[line.kind] += line.a - line.b
    said = [f"{by:.2g} per {kind} step" for kind, by in sorted(fewer.items()) if by >= 1]
    return f"fewer stream waits, {listed(said, _SHOWN)}: check judges the order" if said else ""


def _uncounted(found: Comparison) -> str:
    kinds = {kind for side in found.trials.results for result in side for kind in result.uncounted}
    return f"; not counted: {', '.join(sorted(kinds))} steps" if kinds else ""
