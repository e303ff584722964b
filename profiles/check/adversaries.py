"""Runs the workload under adversaries: the tokens must be the same in every order that the streams allow."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

from ..judge.effects import value_of
from ..platform.pool import MapFunction
from ..platform.resolve import Resolved
from ..ranks.execute import Options
from ..record.conclusion import number_of
from ..record.result import Abstained, Hazards, Result
from ..run.crash import Crash
from ..vgpu.adversary.executor import POISONED
from ..vgpu.adversary.order import COMMON_STRATEGIES, FAVOURED, STRATEGIES, described
from .report import Check, Evidence, skipped, verdict
from .runs import attempt
from .tokens import differences

NAME = "adversary"

Notice = Callable[[str], None]


def seeds(random: int) -> Sequence[int]:
    """The seeds of all strategies, then of ``random`` random orders."""
    return range(len(STRATEGIES) + random)


class Schedules:
    """Runs of a relay under the adversaries ``seeds``. Where ``each`` maps over other processes, those that apply to
    every run begin at once."""

    def __init__(self, question: Resolved, seeds: Sequence[int], each: MapFunction) -> None:
        self._run = partial(_under, question)
        self._name = question.relay.state.name if question.engine is None else question.engine.name
        self._each = each
        self._seeds = seeds
        self._certain = [seed for seed in seeds if not _favouring(seed)]
        self._begun = each(self._run, self._certain)

    def check(self, result: Result, notice: Notice) -> Check:
        """``result`` is the run in program order. ``notice`` is called after each adversary."""
        if isinstance(result.outputs, Abstained):
            return skipped(NAME, result.outputs.abstained)
        more = [seed for seed in self._seeds if _favouring(seed) and concerns(seed, result)]
        chosen = [*self._certain, *more]
        outcomes = chain(self._begun, self._each(self._run, more))
        found: list[Evidence] = []
        for number, (seed, outcome) in enumerate(zip(chosen, outcomes, strict=True), start=1):
            notice(f"{self._name}: {number} of {len(chosen)} adversaries: {described(seed)}")
            found += _differences(seed, outcome, result)
        return verdict(NAME, found, about=f"the same tokens under {_counted(chosen)}")


def concerns(seed: int, result: Result) -> bool:
    """Whether the run has the stream that the seed's strategy favours."""
    if not _favouring(seed):
        return True
    named = {stream for counts in result.per_step.values() for stream in counts.streams}
    copied = {row.stream for row in result.copies} | {row.stream for row in result.syncs}
    return FAVOURED[seed - 1] in named | copied


def _favouring(seed: int) -> bool:
    """Whether the seed's strategy favours a stream that not every run has."""
    return COMMON_STRATEGIES <= seed < len(STRATEGIES)


def _under(question: Resolved, seed: int) -> Result | Crash:
    return attempt(question, Options(device="vgpu", save_tokens=True, adversary=seed, counted=False))


def _differences(seed: int, found: Result | Crash, expected: Result) -> list[Evidence]:
    """The first difference of the run under the adversary, if there is one."""
    where = f"adversary {seed} ({described(seed)})"
    if isinstance(found, Crash):
        return [Evidence(f"{where}: {found}{_unordered(found, expected)}")]
    if found.run.leak and not expected.run.leak:
        return [Evidence(f"{where}: {found.run.leak}")]
    apart = [*differences(found, expected), *_drafts_apart(found, expected)]
    return [Evidence(f"{where}: {evidence.says}") for evidence in apart[:1]]


def _unordered(crash: Crash, expected: Result) -> str:
    """Where poison made the run crash, the hazard of the run in program order with an access at one of the lines that
    the crash names, or else how many hazards there are."""
    hazards = expected.hazards.findings if isinstance(expected.hazards, Hazards) else ()
    if POISONED not in crash.error or not hazards:
        return ""
    named = set(re.findall(r"[\w./-]+\.py:\d+", str(crash)))
    for finding in hazards:
        sites = [access.site for access in (finding.first, finding.second) if access and access.site]
        if named & {f"{site.file}:{site.line}" for site in sites}:
            return f"; the hazard there: {finding.resource}: {finding.missing}"
    return f"; hazards lists {len(hazards)} that lack an order, none of them at that line"


def _drafts_apart(found: Result, expected: Result) -> Iterator[Evidence]:
    """Wrong drafts change the accepted length, not the tokens. With retracted requests, lengths may differ."""
    lengths = [value_of(result, "accept_length") for result in (found, expected)]
    retracted = value_of(expected, "retractions")
    if None not in lengths and lengths[0] != lengths[1] and not retracted:
        yield Evidence(f"drafts: {lengths[0]:.3f} tokens accepted per verify instead of {lengths[1]:.3f}")


def _counted(chosen: Sequence[int]) -> str:
    strategies = sum(seed < len(STRATEGIES) for seed in chosen)
    counts = (strategies, "strategy", "strategies"), (len(chosen) - strategies, "random order", "")
    return " and ".join(number_of(count, one, more) for count, one, more in counts if count)
