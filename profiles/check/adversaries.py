"""Runs the workload under adversaries: the tokens must be the same in every order that the streams allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ...sched.relay.choice import RelayChoice
from ..platform.pool import spread
from ..platform.resolve import Resolved
from ..ranks.execute import Options
from ..record.result import Abstained, Metric, Result
from ..run.crash import Crash
from ..vgpu.adversary.order import ALWAYS, FAVOURED, STRATEGIES, described
from .report import Check, Evidence, skipped, verdict
from .runs import attempt
from .tokens import differences

NAME = "adversary"


def seeds(random: int) -> Sequence[int]:
    """The seeds of all strategies, then of ``random`` random orders."""
    return range(len(STRATEGIES) + random)


def check_schedules(
    resolved: Resolved,
    relay: RelayChoice,
    result: Result,
    chosen: Sequence[int],
    notice: Callable[[str], None] = lambda _: None,
) -> Check:
    """``result`` is the run in program order. ``notice`` is called after each adversary."""
    if isinstance(result.outputs, Abstained):
        return skipped(NAME, result.outputs.abstained)
    chosen = [seed for seed in chosen if concerns(seed, result)]
    found: list[Evidence] = []
    with spread(len(chosen), result.run.wall_s, result.run.import_s) as each:
        runs = each(partial(_against, resolved, relay, result), chosen)
        for number, (seed, evidence) in enumerate(zip(chosen, runs, strict=True), start=1):
            notice(f"{relay.state.name}: {number} of {len(chosen)} adversaries: {described(seed)}")
            found += evidence
    return verdict(NAME, found, about=f"the same tokens under {_counted(chosen)}")


def concerns(seed: int, result: Result) -> bool:
    """Whether the run has the stream that the seed's strategy favours."""
    if not ALWAYS <= seed < len(STRATEGIES):
        return True
    named = {stream for counts in result.per_step.values() for stream in counts.streams}
    copied = {row.stream for row in result.copies} | {row.stream for row in result.syncs}
    return FAVOURED[seed - 1] in named | copied


def _against(resolved: Resolved, relay: RelayChoice, expected: Result, seed: int) -> list[Evidence]:
    """The first difference from ``expected`` under the adversary, if there is one."""
    outcome = attempt(resolved, relay, Options(device="vgpu", save_tokens=True, adversary=seed))
    where = f"adversary {seed} ({described(seed)})"
    if isinstance(outcome, Crash):
        return [Evidence(f"{where}: {outcome}")]
    apart = [*differences(outcome.result, expected), *_drafts_apart(outcome.result, expected)]
    return [Evidence(f"{where}: {evidence.says}") for evidence in apart[:1]]


def _drafts_apart(found: Result, expected: Result) -> Iterator[Evidence]:
    """Wrong drafts change the accepted length, not the tokens. With retracted requests, lengths may differ."""
    lengths = [_value(result, "accept_length") for result in (found, expected)]
    retracted = _value(expected, "retractions")
    if None not in lengths and lengths[0] != lengths[1] and not retracted:
        yield Evidence(f"drafts: {lengths[0]:.3f} tokens accepted per verify instead of {lengths[1]:.3f}")


def _value(result: Result, name: str) -> float | None:
    metric = result.metrics.get(name)
    return metric.values[0] if isinstance(metric, Metric) else None


def _counted(chosen: Sequence[int]) -> str:
    strategies = sum(seed < len(STRATEGIES) for seed in chosen)
    parts = [_some(strategies, "strategy", "strategies")] if strategies else []
    others = len(chosen) - strategies
    parts += [_some(others, "random order", "random orders")] if others else []
    return " and ".join(parts)


def _some(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"
