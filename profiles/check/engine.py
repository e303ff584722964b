"""Runs the checks that an engine of another project can be asked. No check is about times."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final

from ...scenarios.combinations import overlaps
from ...scenarios.script import samplings
from ...scenarios.workload import penalised
from ..platform.engine_choice import EngineChoice
from ..platform.pool import spread
from ..platform.resolve import Resolved
from ..ranks.execute import Options
from ..record.result import Abstained, Result
from ..run.crash import Crash
from . import adversaries, tokens
from .adversaries import Notice
from .conclusion import AGAINST
from .examine import budget, hazards, run_ended, silence
from .report import Check, Evidence, Report, skipped, verdict
from .runs import attempt, with_section

OVERLAP: Final = "overlap"
_COUNTS: Final = re.compile(r"(?<=\.py):\d+|\d+(?= (?:steps|times|writes)\b)")
# Of the checks that need the result of the watched run.
_NAMES: Final = (tokens.NAME, OVERLAP, "hazards", "budget", adversaries.NAME)
_OPTIONS: Final = Options(device="vgpu", save_tokens=True)


def examine_engine(
    resolved: Resolved, seeds: Sequence[int], notice: Notice = silence, *, against: EngineChoice | None = None
) -> Report:
    """``seeds`` are those of the adversaries. Where a check fails, the source ``against`` is examined, too: evidence
    that both show is known, and fails no check but a run that crashed, which nothing could be asked of. Raises
    MachineError, EngineError."""
    report = _examine(resolved, seeds, notice)
    if against is None or not report.failed or report.cancelled:
        return report
    notice(f"the same of {against.name}")
    if report.result is None:
        return _with_crash(report, replace(resolved, engine=against), against.name)
    other = _examine(replace(resolved, engine=against), seeds, notice)
    if other.cancelled:
        unknown = f"interrupted: what {against.name} shows, too, is not taken out"
        checks = [*report.checks, Check(AGAINST, "not asked", unknown)]
        return replace(report, checks=checks, cancelled=True)
    found = {_identity(check.name, one, other) for check in other.checks for one in check.evidence}
    checks = [_without_known(check, found, report) for check in report.checks]
    return replace(report, checks=checks, against=against.name)


def _with_crash(report: Report, resolved: Resolved, against: str) -> Report:
    wall_s = report.wall_s
    with report.interruptible((AGAINST,)):
        crashed = isinstance(attempt(resolved, replace(_OPTIONS, hazards=True)), Crash)
        about = f"the run of {against} {'crashes, too' if crashed else 'does not crash'}"
        report.checks.append(Check(AGAINST, "not applicable", about))
    return replace(report, against=against, wall_s=wall_s + report.wall_s)


def _without_known(check: Check, found: Collection[object], report: Report) -> Check:
    known = tuple(one for one in check.evidence if _identity(check.name, one, report) in found)
    if not known:
        return check
    new = [one for one in check.evidence if one not in known]
    return replace(verdict(check.name, new, about=f"nothing new; {len(known)} known"), known=known)


def _identity(check: str, evidence: Evidence, report: Report) -> object:
    """Equal for the same evidence against two sources of an engine, in which lines may have moved, and whose runs may
    have different numbers of steps. The message of a run that failed has the source's name."""
    sites = [(site.file, site.function, site.statement) for site in evidence.sites]
    return check, _COUNTS.sub("", evidence.says.replace(f"{report.engine}: ", "")), *sites


def _examine(resolved: Resolved, seeds: Sequence[int], notice: Notice) -> Report:
    assert resolved.engine is not None
    report = Report(resolved.relay, resolved.engine.name)
    with report.interruptible(("run", *_NAMES)):
        for check in _checks(resolved, seeds, notice, report):
            report.checks.append(check)
    return report


def _checks(resolved: Resolved, seeds: Sequence[int], notice: Notice, report: Report) -> Iterator[Check]:
    """Gives ``report`` the result of the watched run."""
    notice("watched run")
    result = attempt(resolved, replace(_OPTIONS, hazards=True))
    yield run_ended(result)
    if isinstance(result, Crash):
        yield from (skipped(name, "the run crashed") for name in _NAMES)
        return
    report.result = result
    notice("reference runs")
    yield from _tokens(resolved, result)
    yield from (hazards(result.hazards), budget(result, kinds=len(resolved.scenario.expect)))
    notice("adversaries")
    with spread(len(seeds), result.run.wall_s, result.run.import_s) as each:
        yield adversaries.Schedules(resolved, seeds, each).check(result, notice)


def _tokens(resolved: Resolved, result: Result) -> Iterator[Check]:
    """Against our own scheduler, whose model the engine runs, and against the engine's own serial loop."""
    overlapped = overlaps(resolved.scenario)
    why = result.outputs.abstained if isinstance(result.outputs, Abstained) else ""
    if overlapped and not why and penalised(resolved.scenario):
        why = "penalties may lag under overlap: equal tokens are not promised"
    if why:
        yield from (skipped(name, why) for name in (tokens.NAME, OVERLAP))
        return
    if any(sampling.temperature for sampling in samplings(resolved.scenario)):
        yield skipped(tokens.NAME, "the engine draws its tokens by a sampler of its own")
        yield skipped(
            OVERLAP, "batches differ without overlap, and with them the order in which tokens are drawn"
        )
        return
    own = tokens.reference(tokens.reference_question(replace(resolved, engine=None)))
    yield tokens.alike(tokens.NAME, result, own, "as our own scheduler's serial loop")
    if not overlapped:
        yield skipped(OVERLAP, "the run was without overlap")
        return
    serial = attempt(with_section(resolved, "engine", overlap=False), _OPTIONS)
    yield tokens.alike(OVERLAP, result, serial, "as the engine without overlap")
