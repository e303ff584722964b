"""Every known bug: without the fault no check fails, and with it the listed checks fail with a readable reason."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from schedbench.profiles.check.adversaries import seeds
from schedbench.profiles.check.all_faults import examine_one_batch
from schedbench.profiles.check.contract import check_contract
from schedbench.profiles.check.examine import Examiner
from schedbench.profiles.check.faults import FaultScenario, fault_scenario, fault_scenarios
from schedbench.profiles.check.report import Report
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.record.result import Result
from schedbench.profiles.run.crash import Crash
from schedbench.sched.relay.faults import Fault, faults

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "check.md").read_text()
# The page's table: for each fault its reference, state and loop, and the checks that find it.
ROWS = {
    name.strip("`"): rest
    for name, *rest in (line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `"))
}
CATCHERS = {name: set(checks.split(", ")) for name, (*_, checks) in ROWS.items()}
# A part of the evidence that names the cause, from the most specific check.
SAYS = {
    "one-sided-merge": "TypeError: the side that joins carries no token ids (at sched/relay/tokens.py:",
    "penalties-from-input": "the batch whose tokens are to be counted has no input ids",
    "allocate-by-sentinel": "'s slot by length -",
    "mix-with-sentinel": "the model is given seq_lens -",
    "hot-buffer-by-sentinel": "but its hot buffer has slot",
    "resolve-ids-first": "new_seq_lens_buf[-batch.seq_lens]",
    "stage-without-stash": "row 1 of the relay was gathered before a token was stashed there",
    "stage-tokens-unawaited": "result of receive at sched/loop/pipelined.py:",
    "prebuilt-unpublished": "torch._assert_async(condition)",
    "publish-ready-overwritten": "new_seq_lens_buf: the forward stream's write (index_put_ at sched/relay/context.py:",
    "pd-freed-block-race": "the transfer stream's read (gather_kv at sched/disagg/kv.py:",
    "pd-overwritten-page": "must come before the transfer stream's write (scatter_kv at sched/disagg/kv.py:",
    "rejoin-without-mirror": "the running batch (last launched as step -1) has no req_pool_indices_cpu",
    "never-resolve": "step 0 has no input ids: its relay was not resolved (at sched/loop/launch.py:",
    "encoder-rebuilt-on-device": "step 0 has 28 tokens but 81 input_ids",
    "list-for-the-bridge": "'list' object has no attribute 'to' (at sched/relay/tokens.py:",
    "onebatch-never-resolves": "step 1 has no input ids: its relay was not resolved (at sched/loop/launch.py:",
    "onebatch-penalises-the-prompt": " got other tokens than the scheduler gives it",
    "embedding-never-resolves": "step 0 has no input ids: its relay was not resolved (at sched/loop/launch.py:",
    "deferred-never-resolves": "step 0 has no input ids: its relay was not resolved (at sched/loop/launch.py:",
    "no-barrier": "the forward stream's read (attention at sched/",
    "small-ring": "of the relay gave token",
    "negative-ids-replaced": "the prompt's token is ",
    "nothing-kept-alive": "no reference kept until then, and no wait between them",
    "one-launch-kept-alive": "no reference kept until then, and no wait between them",
    "staging-refilled": "the host's write (copy_ at sched/relay/broken.py:",
    "gather-without-stash": "of the relay was gathered before a token was stashed there",
    "emptied-batch-merged": "has other rows than its ",
    "stash-before-sampling": "step 0 is stashed before it was sampled",
    "advance-in-place": "the schedule stream's write (add_ at sched/relay/lengths.py:",
    "dead-publish": " writes, is never read",
    "isolation-restores-staging": "after the forward of step 1 its batch has 64 staged ids",
    "worker-extras-not-kept": "no reference kept until then, and no wait between them",
    "accepted-tokens-stashed": "cannot be broadcast to indexing result of shape [6] (at sched/relay/context.py:",
    "missing-host-lengths-used": "no attribute 'seq_lens_cpu' (at sched/relay/broken.py:",
    "draft-extends-lengths": "left lengths [",
}


pytestmark = pytest.mark.usefixtures("nothing_unproven")

ALL_ORDERS = tuple(seeds(random=0))
PROGRAM_ORDER: tuple[int, ...] = ()


REFERENCES: dict[str, Result | Crash] = {}


@cache
def examiner(scenario: str, overrides: tuple[str, ...], adversaries: tuple[int, ...]) -> Examiner:
    """One examiner per question, because it makes the reference runs of its drafts once."""
    return Examiner(ask(scenario, overrides), adversaries, references=REFERENCES)


@cache
def sound(scenario: str, overrides: tuple[str, ...], adversaries: tuple[int, ...], onebatch: bool) -> Report:
    """Faults of one scenario share its examination without a fault."""
    without = examiner(scenario, overrides, adversaries)
    question = without.resolved
    return examine_one_batch(question) if onebatch else without.examine(question.relay)


def broken(scenario: FaultScenario, adversaries: tuple[int, ...]) -> Report:
    question = scenario.question()
    if scenario.onebatch:
        return examine_one_batch(question)
    return examiner(scenario.scenario, scenario.overrides, adversaries).examine(question.relay)


def caught(report: Report) -> set[str]:
    return {check.name for check in report.failed}


def evidence_of(report: Report) -> str:
    return "\n".join(evidence.says for check in report.failed for evidence in check.evidence)


@pytest.mark.wide
@pytest.mark.parametrize("name", faults())
@pytest.mark.parametrize("adversaries", [PROGRAM_ORDER, ALL_ORDERS], ids=["program order", "all orders"])
def test_a_fault_is_found_and_its_absence_passes(name: str, adversaries: tuple[int, ...]) -> None:
    """Hazards find in program order what would otherwise need an adversary's order."""
    scenario = fault_scenarios()[name]
    off = sound(scenario.scenario, scenario.overrides, adversaries, scenario.onebatch)
    on = broken(scenario, adversaries)
    assert caught(off) == set(), evidence_of(off)
    assert caught(on) == (CATCHERS[name] if adversaries else CATCHERS[name] - {"adversary"})
    assert SAYS[name] in evidence_of(on)


def several(fault: Fault) -> bool:
    return len(fault.states) > 1 or len(fault.loops) > 1


def in_another(fault: Fault) -> object:
    """The contract is checked at once; other checks run the scenario."""
    marks = () if "contract" in CATCHERS[fault.name] else pytest.mark.wide
    return pytest.param(fault.name, marks=marks)


@pytest.mark.parametrize("name", [in_another(fault) for fault in faults().values() if several(fault)])
def test_a_fault_is_found_in_its_other_states_and_loops(name: str) -> None:
    """The cheapest check that finds the fault runs on the last of each."""
    fault = faults()[name]
    scenario = fault_scenario(fault, state=fault.states[-1], loop=fault.loops[-1])
    if scenario.onebatch:
        assert broken(scenario, ()).failed
        return
    question = scenario.question()
    relay, overlap = question.relays[0], fault.loops[-1] == "overlapped"
    kept = check_contract(
        lambda: relay.row(overlap=overlap), overlap=overlap, declared=relay.state.known_defects
    )
    assert kept.broken or Examiner(question, ()).examine(relay).failed


def test_stashing_before_sampling_is_harmless_without_grammar() -> None:
    """A launch may stash tokens that are already sampled."""
    tokens = fault_scenario(faults()["stash-before-sampling"])
    unspelled = FaultScenario(tokens.fault, tokens.scenario, tokens.overrides[:2])
    assert caught(broken(unspelled, PROGRAM_ORDER)) == set()


def test_the_page_lists_every_fault_with_its_reference() -> None:
    """Whether the listed checks find it, ``test_a_fault_is_found_and_its_absence_passes`` asks."""
    assert {name: reference for name, (reference, *_) in ROWS.items()} == {
        fault.name: fault.reference for fault in faults().values()
    }
