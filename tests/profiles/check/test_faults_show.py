"""Every known bug: nothing is found with the fault off, and with it on these catchers see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pytest

from schedbench.profiles.check.contract import Kept, check_contract
from schedbench.profiles.check.invariants import Invariants
from schedbench.profiles.check.probes import Probe, probe, probes
from schedbench.profiles.check.violations import Violation
from schedbench.profiles.crash import BrokenRunError
from schedbench.profiles.execute import Options, execute
from schedbench.profiles.resolve import Resolved
from schedbench.profiles.result import Hazards, Outputs
from schedbench.scenarios.combinations import overlaps
from schedbench.sched.relay.faults import Fault, faults

# tokens: another digest. hazard: a finding that the state does not declare. invariant: a promise broken in a run.
# contract: one broken on batches made by hand. crash: the run breaks down.
CATCHERS = {
    "one-sided-merge": {"contract", "crash"},
    "penalties-from-input": {"contract", "crash"},
    "allocate-by-sentinel": {"contract", "invariant", "tokens"},
    "mix-with-sentinel": {"contract", "invariant", "crash"},
    "resolve-ids-first": {"contract", "crash"},
    "never-resolve": {"contract", "crash"},
    "no-barrier": {"hazard"},
    "small-ring": {"contract", "invariant", "tokens"},
    "negative-ids-replaced": {"contract"},
    "nothing-kept-alive": {"hazard"},
    "one-launch-kept-alive": {"hazard"},
    "staging-refilled": {"hazard"},
    "gather-without-stash": {"contract", "invariant", "crash"},
    "emptied-batch-merged": {"contract", "invariant", "crash"},
    "stash-before-sampling": {"crash"},
    "advance-in-place": {"hazard"},
    "dead-publish": {"hazard"},
    "isolation-restores-staging": {"invariant"},
    "worker-extras-not-kept": {"hazard"},
    "accepted-tokens-stashed": {"crash"},
    "missing-host-lengths-used": {"crash"},
    "draft-extends-lengths": {"invariant"},
}
# A sentence that a reader can act on, of whoever says most.
SAYS = {
    "one-sided-merge": "TypeError: the side that joins carries no token ids (at sched/relay/placeholders.py:",
    "penalties-from-input": "the batch whose tokens are to be penalised carries no input ids",
    "allocate-by-sentinel": "on the device and 64 in seq_lens_cpu",
    "mix-with-sentinel": "the model is given seq_lens -",
    "resolve-ids-first": "new_seq_lens_buf[-batch.seq_lens]",
    "never-resolve": "step 0 has no input ids: its relay was not resolved (at sched/loop/launch.py:",
    "no-barrier": "the forward stream's read (attention at sched/",
    "small-ring": "of the relay gave token",
    "negative-ids-replaced": "the prompt's token is ",
    "nothing-kept-alive": "no reference kept until then, and no wait between them",
    "one-launch-kept-alive": "no reference kept until then, and no wait between them",
    "staging-refilled": "the host's write (copy_ at sched/relay/broken.py:",
    "gather-without-stash": "of the relay was gathered before a token was left there",
    "emptied-batch-merged": "has other rows than its ",
    "stash-before-sampling": "step 0 is stashed before it was sampled",
    "advance-in-place": "the schedule stream's write (add_ at sched/relay/lengths.py:",
    "dead-publish": "nobody ever reads new_seq_lens_buf",
    "isolation-restores-staging": "after the forward of step 1 its batch has 64 staged ids",
    "worker-extras-not-kept": "no reference kept until then, and no wait between them",
    "accepted-tokens-stashed": "cannot be broadcast to indexing result of shape [6] (at sched/relay/futures.py:",
    "missing-host-lengths-used": "the batch has no host lengths that rows could be taken from",
    "draft-extends-lengths": "left lengths [",
}


@dataclass(frozen=True)
class Seen:
    """A question put to every catcher."""

    question: Resolved
    digest: str | None
    hazards: tuple[str, ...]
    violations: tuple[Violation, ...]
    crash: str

    @classmethod
    def of(cls, question: Resolved) -> Seen:
        guard, options = Invariants(), Options(device="vgpu", hazards=True)
        digest, hazards, crash = None, (), ""
        try:
            result = execute(question, question.relays[0], options, guard=guard).result
        except BrokenRunError as error:
            crash = str(error)
        else:
            assert isinstance(result.outputs, Outputs) and isinstance(result.hazards, Hazards)
            digest = result.outputs.digest
            hazards = tuple(finding.missing for finding in result.hazards.findings)
        return cls(question, digest, hazards, tuple(guard.violations()), crash)

    @cached_property
    def contract(self) -> Kept:
        relay, overlap = self.question.relays[0], overlaps(self.question.scenario)
        return check_contract(
            lambda: relay.row(overlap=overlap), overlap=overlap, declared=relay.known_defects
        )

    def catchers(self, sound: Seen) -> set[str]:
        caught = {
            "crash": self.crash,
            "hazard": self.hazards,
            "invariant": self.violations,
            "contract": self.contract.broken,
            "tokens": self.digest not in (None, sound.digest),
        }
        return {name for name, evidence in caught.items() if evidence}

    def said(self) -> str:
        told = [*self.violations, *self.contract.broken]
        return "\n".join([self.crash, *self.hazards, *(violation.says for violation in told)])


@pytest.fixture(scope="module")
def sound() -> dict[tuple[str, ...], Seen]:
    """Runs without a fault, by what was asked."""
    return {}


def without(probe: Probe, sound: dict[tuple[str, ...], Seen]) -> Seen:
    asked = (probe.scenario, *probe.overrides)
    if asked not in sound:
        sound[asked] = Seen.of(probe.sound())
    return sound[asked]


@pytest.mark.parametrize("name", faults())
def test_off_it_is_clean_and_on_it_is_caught(name: str, sound: dict[tuple[str, ...], Seen]) -> None:
    probe = probes()[name]
    off, on = without(probe, sound), Seen.of(probe.broken())
    assert off.catchers(off) == set(), off.said()
    assert on.catchers(off) == CATCHERS[name]
    assert SAYS[name] in on.said()


def several(fault: Fault) -> bool:
    return len(fault.states) > 1 or len(fault.loops) > 1


@pytest.mark.parametrize("name", [fault.name for fault in faults().values() if several(fault)])
def test_nor_does_it_hide_in_another_state_or_loop(name: str) -> None:
    """By the cheapest catcher that sees it, in the last of each."""
    fault = faults()[name]
    question = probe(fault, state=fault.states[-1], loop=fault.loops[-1]).broken()
    relay, overlap = question.relays[0], fault.loops[-1] == "overlapped"
    kept = check_contract(lambda: relay.row(overlap=overlap), overlap=overlap, declared=relay.known_defects)
    if not kept.broken:
        seen = Seen.of(question)
        assert seen.hazards or seen.crash or seen.violations


def test_what_is_harmless_alone_is_no_fault() -> None:
    """A decode may keep its tokens where merging looks at both sides; and a launch may stash what is sampled."""
    tokens = probe(faults()["stash-before-sampling"])
    unspelled = Probe(tokens.fault, tokens.scenario, tokens.overrides[:2])
    assert Seen.of(unspelled.broken()).catchers(Seen.of(unspelled.sound())) == set()
