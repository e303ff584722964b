"""Runs all checks of a relay on a scenario, the cheapest first, and says what was not asked, so that a passed check is
not taken for more than it is. No check is about times."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from threading import Timer

from ...scenarios.combinations import MODES, overlaps
from ...sched.relay.choice import RelayChoice
from ..engines.adapter import find_adapter
from ..engines.names import parse_engine
from ..judge.likeness import in_brief
from ..measure.budget import Breach, Offender, asked, breaches, untested, untested_text
from ..platform.engine_choice import EngineChoice
from ..platform.pool import MapFunction, pays_from, prepare_pool, spread
from ..platform.resolve import Resolved, row_mode, speculation
from ..ranks.execute import Options
from ..record.conclusion import number_of
from ..record.result import Abstained, HazardFinding, Hazards, Result
from ..run.crash import Crash
from ..run.machines import DeviceChoice
from ..run.system import NO_PROGRESS
from ..vgpu.adversary.order import STRATEGIES, described
from ..vgpu.hazards.findings import FREED, accessor
from . import adversaries, drafts, tokens
from .adversaries import Notice, Schedules
from .batch_invariants import Violation
from .contract import check_contract, speculating
from .invariants import Invariants
from .report import Check, Evidence, Report, skipped, verdict
from .runs import attempt, with_section
from .unproven import unproven, without_references


def silence(message: str) -> None:
    """A notice function that prints nothing."""


@dataclass(slots=True)
class Examiner:
    """``adversaries`` are seeds. Reference runs are made once for all relays of the scenario; all examiners that have
    the same ``references`` share those of equal questions."""

    resolved: Resolved
    adversaries: Sequence[int]
    notice: Notice = silence
    references: dict[str, Result | Crash] = field(default_factory=dict)
    _drafts: Callable[[], drafts.DraftStarts | Crash] = field(init=False)

    def __post_init__(self) -> None:
        self._drafts = cache(partial(drafts.reference_drafts, self.resolved))

    def examine(self, relay: RelayChoice) -> Report:
        """Raises MachineError."""
        report, question = Report(relay), self.resolved.with_relay(relay)
        with report.interruptible(("run", "invariants", "contract", *self._names)), self._spread() as each:
            without = without_references(question, each)
            schedules = Schedules(question, self.adversaries, each)
            result, first = watched_run(question, self.notice)
            report.checks += [*first, self._contract(relay)]
            if not isinstance(result, Crash):
                report.result = result
                self.notice(f"{relay.state.name}: references that launches keep")
                report.unproven = unproven(question, result, without)
            for check in self._others(question, result, schedules):
                report.checks.append(check)
        return report

    @property
    def _speculates(self) -> bool:
        return speculation(self.resolved.scenario) is not None and not self.resolved.scenario.faults

    @property
    def _names(self) -> tuple[str, ...]:
        """Of the checks that need the result of the watched run."""
        drafting = (drafts.NAME,) if self._speculates else ()
        return tokens.NAME, *drafting, "hazards", "budget", adversaries.NAME

    def checks(self, relay: RelayChoice) -> Iterator[Check]:
        """The checks of ``examine``, the cheapest first, each asked when it is read. Raises MachineError."""
        yield self._contract(relay)
        question = self.resolved.with_relay(relay)
        result, first = watched_run(question, self.notice)
        yield from first
        if not isinstance(result, Crash):
            yield hazards(result.hazards)
        others = self._others(question, result, Schedules(question, self.adversaries, map))
        yield from (check for check in others if isinstance(result, Crash) or check.name != "hazards")

    def _contract(self, relay: RelayChoice) -> Check:
        mode = row_mode(self.resolved.scenario)
        worker = mode["speculation"]
        found = check_contract(
            lambda: relay.row(**mode),
            overlap=mode["overlap"],
            declared=relay.state.known_defects,
            drafts=None if worker is None else partial(speculating, relay, worker),
        )
        defects = "; but for " + "; ".join(found.known) if found.known else ""
        return verdict("contract", _broken(found.broken), about=f"kept on scripted batches{defects}")

    def _spread(self) -> AbstractContextManager[MapFunction]:
        """A map function for the adversaries. Where it is of other processes, they run beside the watched run."""
        count = len(self.adversaries)
        if self.resolved.scenario.faults or not count:
            return nullcontext(map)
        certain = pays_from(count)
        preparing = Timer(certain, prepare_pool)
        if certain < inf:
            preparing.start()
        try:
            reference = self.reference
        finally:
            preparing.cancel()
        if isinstance(reference, Crash) or isinstance(reference.outputs, Abstained):
            return nullcontext(map)
        return spread(count, reference.run.wall_s)

    def _others(self, question: Resolved, result: Result | Crash, schedules: Schedules) -> Iterator[Check]:
        if isinstance(result, Crash):
            yield from (skipped(name, "the run crashed") for name in self._names)
            return
        yield tokens.check_tokens(question, result, self.reference)
        if self._speculates:
            self.notice(f"{question.relay.state.name}: drafts")
            yield drafts.check_drafts(question, self._drafts)
        yield hazards(result.hazards)
        yield budget(result, kinds=len(self.resolved.scenario.expect))
        if self.resolved.scenario.faults:
            yield skipped(adversaries.NAME, "at other times the scripted faults would hit other requests")
            return
        self.notice(f"{question.relay.state.name}: adversaries")
        yield schedules.check(result, self.notice)

    @property
    def reference(self) -> Result | Crash:
        question = tokens.reference_question(self.resolved)
        key = question.scenario.model_dump_json()
        if key not in self.references:
            self.notice("reference run")
            self.references[key] = tokens.reference(question)
        return self.references[key]


def watched_run(
    question: Resolved, notice: Notice, device: DeviceChoice = "vgpu"
) -> tuple[Result | Crash, Sequence[Check]]:
    """A run that is watched for hazards, and what its end and its invariants say."""
    notice(f"{question.relay.state.name}: watched run")
    guard = Invariants()
    result = attempt(question, Options(device=device, save_tokens=True, hazards=True), guard)
    scripted = bool(question.scenario.faults)
    return result, (run_ended(result, scripted=scripted), invariants(guard, result))


def run_ended(result: Result | Crash, *, scripted: bool = False) -> Check:
    """``scripted``: whether faults are scripted, so that requests may fail."""
    if isinstance(result, Crash):
        return Check("run", "failed", "crashed", (Evidence(str(result)),))
    requests = result.requests
    rows = (row for row in requests if row.status == "failed")
    failed = [Evidence(f"request {row.id} failed: {in_brief(row.reason)}") for row in rows]
    failed += [Evidence(result.run.leak)] if result.run.leak else []
    ends = f"{number_of(len(requests), 'request')} ended"
    wrong = [Evidence(f"did not happen: {entry}") for entry in result.run.missed]
    if not scripted:
        return verdict("run", failed + wrong, about=ends)
    failure = result.run.failure or "every rank ended"
    if NO_PROGRESS in failure:  # no script stops a loop: its rank dies, or gives requests up
        wrong.append(Evidence(failure))
    return verdict("run", wrong, about=f"{ends}, {len(failed)} of them failed; {failure}")


def invariants(guard: Invariants, result: Result | Crash) -> Check:
    until = "as far as the run got" if isinstance(result, Crash) else "at every step"
    about = f"mirrors, relay rows and ends {until}; pages, a large pool's now and then"
    return verdict("invariants", _broken(guard.violations()), about=about)


def _broken(promises: Sequence[Violation]) -> list[Evidence]:
    return [Evidence(f"{broken.promise}: {broken.says}", field=broken.field) for broken in promises]


def hazards(found: Hazards | Abstained) -> Check:
    if not isinstance(found, Hazards):
        return skipped("hazards", found.abstained)
    evidence = [
        Evidence(
            f"{finding.resource}: {finding.missing}",
            tuple(a.site for a in (finding.first, finding.second) if a is not None and a.site is not None),
            field=finding.resource,
            group=_order(finding),
            callers=() if finding.second is None else finding.second.callers,
        )
        for finding in found.findings
    ]
    known = f"none but what the state declares: {'; '.join(found.known)}" if found.known else "none"
    return verdict("hazards", evidence, about=known)


def _order(finding: HazardFinding) -> str:
    """The order that the hazard lacks. One edge may give it to all hazards between the same streams."""
    if finding.second is None:
        return ""
    first, second = (accessor(access.stream) for access in (finding.first, finding.second))
    if finding.resource.startswith(FREED):
        return f"where {second} re-uses a block that {first} still uses"
    return f"where {second} does not wait for {first}"


def budget(result: Result, *, kinds: int) -> Check:
    """``kinds`` is the number of step kinds with a budget. A kind without steps, or whose
    conditions the run does not meet, is not kept but open."""
    if not kinds:
        return skipped("budget", "the scenario has none; --expect sets one")
    bounds, not_asked = asked(result)
    without_steps = untested(bounds, result)
    open_kinds = [f"no step was of kind {', '.join(without_steps)}"] if without_steps else []
    open_kinds += [f"{kind} not asked: {reason}" for kind, reason in not_asked.items()]
    if len(without_steps) + len(not_asked) == kinds:
        return skipped("budget", "; ".join(open_kinds))
    evidence = [_breach(breach) for breach in breaches(bounds, result)]
    return verdict("budget", evidence, about="; ".join(("kept by every step", *open_kinds)))


def require_tested(report: Report, kinds: Collection[str]) -> None:
    """Fails the budget of each kind of step that the run had none of: a budget that asked nothing does not pass."""
    if (result := report.result) is not None and result.per_step:
        missing = tuple(Evidence(untested_text(kind, result)) for kind in kinds if not result.steps()[kind])
        for at, check in enumerate(report.checks):
            if missing and check.name == "budget":
                found = f"{len(check.evidence) + len(missing)} found"
                report.checks[at] = Check("budget", "failed", found, (*check.evidence, *missing))


def _breach(breach: Breach) -> Evidence:
    where = f"{breach.kind}.{breach.stream}.{breach.counter}"
    lines = ", ".join(_offender(offender) for offender in breach.offenders)
    had = number_of(breach.steps_with, "step")
    says = f"{where}: {breach.seen} in the worst step, {breach.allowed} allowed; {had} had any"
    sites = tuple(offender.site for offender in breach.offenders if offender.site is not None)
    return Evidence(f"{says}{': ' if lines else ''}{lines}", sites)


def _offender(offender: Offender) -> str:
    where = f"{offender.site.file}:{offender.site.line}" if offender.site else "an unknown line"
    return f"{number_of(offender.times, 'time')} at {where} ({offender.range})"


# The checks of our own scheduler only, and why.
OWN_ONLY: Mapping[str, str] = {
    "contract": "of our own relay",
    "invariants": "of our own batches and pools",
}
# The checks that run on the virtual GPU only, and why.
VGPU_ONLY: Mapping[str, str] = {
    "contract": "it does not depend on the device: check on the virtual GPU",
    tokens.NAME: "a GPU's rounding depends on its batches: check on the virtual GPU",
    drafts.NAME: "a GPU's rounding depends on its batches: check on the virtual GPU",
    "budget": "a pass that is checked for hazards has no counts: use run",
    adversaries.NAME: "the order of work on a real device cannot be chosen",
}


def examine_on_cuda(resolved: Resolved, notice: Notice = silence) -> Sequence[Report]:
    """Check every relay of the question on a CUDA device: the run's end, its invariants, and its hazards. Raises
    MachineError."""
    from ..cuda.machine import require_one_device  # which a virtual GPU does not need

    require_one_device(resolved)
    return [_on_cuda(resolved.with_relay(relay), notice) for relay in resolved.relays]


def _on_cuda(question: Resolved, notice: Notice) -> Report:
    begin = time.perf_counter()
    run, first = watched_run(question, notice, "cuda")
    result = None if isinstance(run, Crash) else run
    found = skipped("hazards", "the run crashed") if result is None else hazards(result.hazards)
    drafting = speculation(question.scenario) is not None
    others = [skipped(name, why) for name, why in VGPU_ONLY.items() if drafting or name != drafts.NAME]
    return Report(
        question.relay, checks=[*first, found, *others], result=result, wall_s=time.perf_counter() - begin
    )


_EARLY_ENDS = (
    ("stop", "by a token", "--set workload.sampling={ignore_eos: false, stop_token_ids: [...]}"),
    ("aborted", "by a client", "--set workload.abort.fraction=0.3"),
)


def not_asked(resolved: Resolved, seeds: Sequence[int], reports: Sequence[Report]) -> dict[str, str]:
    """In words, by what was left out. ``seeds`` are those of the adversaries that were chosen."""
    return {name: text for name, text in _parts(resolved, seeds, reports) if text}


def _parts(resolved: Resolved, seeds: Sequence[int], reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    asked = {seed for report in reports for seed in seeds if _ran(seed, report)}
    scenario = resolved.scenario
    loop = "overlapped loop" if overlaps(scenario) else "serial loop"
    modes = [name for name, mode in MODES.items() if name != "overlap" and mode.on(scenario)]
    relays = [report.relay for report in reports]
    planted = sorted({fault.name for relay in relays for fault in relay.faults})
    yield "strategies", ", ".join(described(n) for n in range(len(STRATEGIES)) if n not in asked)
    yield "random orders", _all_but([f"seed {seed}" for seed in sorted(asked) if seed >= len(STRATEGIES)])
    yield "modes", _all_but([loop, *modes])
    if resolved.engine is not None:
        yield from OWN_ONLY.items()
        yield from _own_runner_left_out(resolved, resolved.engine)
        yield "ends of requests", _ends_left_out(reports)
        alone = any(report.failed and report.against is None and not report.cancelled for report in reports)
        yield "another source with the same findings", "--against ENGINE" if alone else ""
        return
    yield "relays", _all_but(list(dict.fromkeys(relay.state.name for relay in relays)))
    yield "known bugs", _all_but(planted) + ("" if planted else " (--all-faults)")
    yield "scripted failures", "" if scenario.faults else "all"


def _own_runner_left_out(resolved: Resolved, engine: EngineChoice) -> Iterator[tuple[str, str]]:
    """How to run the engine's own model runner instead of the stub, or why it cannot run, and what the stub hides;
    nothing where no stub ran."""
    adapter = find_adapter(parse_engine(engine.name).adapter)
    hidden = getattr(adapter, "stub_runner", None)
    if hidden is not None and not MODES["own model runner"].on(resolved.scenario):
        owned = with_section(resolved, "engine", model_runner="own")
        needs = getattr(adapter, "needs", lambda _: ())(owned.scenario)
        why = f", because {' and '.join(needs)}" if needs else " (--set engine.model_runner=own runs it)"
        yield "the engine's own model runner", f"a stub took its place{why}"
        found = [text for mode, text in hidden.items() if MODES[mode].on(resolved.scenario)]
        yield "waits and references", " and ".join(found)


def _ends_left_out(reports: Sequence[Report]) -> str:
    """The ends that no request had. An overlapped loop learns that a token or a client has ended a request only after
    the next step was launched, so that other code of the engine runs than at the end of a full request."""
    results = [report.result for report in reports if report.result is not None]
    ends = {row.reason if row.status == "finished" else row.status for one in results for row in one.requests}
    missing = [f"{how} ({key})" for end, how, key in _EARLY_ENDS if end not in ends]
    return " and ".join(missing) if results else ""


def _ran(seed: int, report: Report) -> bool:
    """Whether the workload was run under the adversary."""
    applied = any(
        check.name == adversaries.NAME and check.verdict in ("passed", "failed") for check in report.checks
    )
    return applied and report.result is not None and adversaries.concerns(seed, report.result)


def _all_but(names: Sequence[str]) -> str:
    return f"all but {', '.join(names)}" if names else "all"
