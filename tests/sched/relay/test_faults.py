"""The list of known bugs: each changes the rows of its states, and no others."""

from __future__ import annotations

import pickle
import re

import pytest

from schedbench.sched.relay.choice import RelayError, choose, difference
from schedbench.sched.relay.faults import Fault, awaited_faults, faults
from schedbench.sched.relay.states import states

FAULTS = pytest.mark.parametrize("fault", faults().values(), ids=faults())


@FAULTS
def test_a_fault_changes_the_rows_of_its_states(fault: Fault) -> None:
    for state in fault.states:
        for loop in fault.loops:
            sound, mode = choose(state, {}), fault.speculation
            where = {"overlap": loop == "overlapped", "staged": loop == "pipelined"}
            broken = sound.broken_by(fault, speculation=mode, onebatch=loop == "onebatch", **where)
            rows = (choice.row(speculation=mode, **where) for choice in (sound, broken))
            drafts = [choice.draft_row(mode) for choice in (sound, broken)]
            changed = difference(*rows)
            if drafts[0] is not None and drafts[1] is not None:
                changed |= difference(drafts[0], drafts[1])
            assert changed or not fault.appends
            assert broken.known_hazards() == sound.known_hazards()


def test_faults_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(list(faults().values())))
    assert [fault.name for fault in again] == list(faults())


@pytest.mark.parametrize("name", [fault.name for fault in faults().values() if fault.speculation])
def test_a_fault_of_one_speculative_worker_is_refused_by_the_other(name: str) -> None:
    fault = faults()[name]
    for mode in (None, "v2" if fault.speculation == "v1" else "v1"):
        with pytest.raises(RelayError, match=f"{name} belongs to speculation {fault.speculation}, .* is "):
            choose(fault.states[0], {}).broken_by(
                fault, overlap=fault.loops == ("overlapped",), speculation=mode
            )


@FAULTS
def test_a_fault_is_refused_by_other_states_and_loops(fault: Fault) -> None:
    others = [state for state in states() if state not in fault.states]
    for state in others:
        with pytest.raises(
            RelayError, match=f"fault {fault.name} belongs to {fault.states[0]}.*not to {state}"
        ):
            choose(state, {}).broken_by(fault, overlap=True)
    if len(fault.loops) == 1:
        with pytest.raises(RelayError, match=f"belongs to the {fault.loops[0]} loop"):
            choose(fault.states[0], {}).broken_by(fault, overlap=fault.loops == ("serial",))


def test_faults_have_unique_names_references_and_descriptions() -> None:
    entries = [*faults().values(), *awaited_faults().values()]
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.name)
        assert re.match(r"(4\.10|5\.\d+), ", entry.reference)
        assert entry.about.endswith(".")


def test_every_known_bug_is_a_fault_or_awaited() -> None:
    """The second half of 5.25 is left out: an attribute that is no field here."""
    entries = [*faults().values(), *awaited_faults().values()]
    found = {number for entry in entries for number in re.findall(r"^5\.(\d+)", entry.reference)}
    numbers = set(map(int, found))
    assert numbers == set(range(1, 27))


def test_a_fault_that_a_switch_already_made_is_refused() -> None:
    with pytest.raises(RelayError, match="no-barrier changes nothing in pr25945 as it is switched here"):
        choose("pr25945", {"barrier": "off"}).broken_by(faults()["no-barrier"], overlap=True)


def test_a_stateful_policy_is_created_for_each_run() -> None:
    broken = choose("pr25945", {}).broken_by(faults()["staging-refilled"], overlap=True)
    assert broken.row(overlap=True).staging is not broken.row(overlap=True).staging
    assert broken.policies(overlap=True)["staging"] == "refilled"


def test_faults_add_up() -> None:
    choice = choose("pr25945", {})
    for name in ("no-barrier", "gather-without-stash"):
        choice = choice.broken_by(faults()[name], overlap=True)
    changed = difference(choose("pr25945", {}).row(overlap=True), choice.row(overlap=True))
    assert changed.keys() == {"barrier", "stash"}
