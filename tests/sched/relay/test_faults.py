"""The list of known bugs: each changes the rows that it belongs to, and no other."""

from __future__ import annotations

import pickle
import re

import pytest

from schedbench.sched.relay.choice import RelayError, choose, difference
from schedbench.sched.relay.faults import Fault, awaited_faults, faults
from schedbench.sched.relay.states import states

FAULTS = pytest.mark.parametrize("fault", faults().values(), ids=faults())


@FAULTS
def test_a_fault_breaks_the_rows_that_it_names(fault: Fault) -> None:
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


@FAULTS
def test_a_fault_can_be_told_to_another_process(fault: Fault) -> None:
    assert pickle.loads(pickle.dumps(fault)).name == fault.name


@pytest.mark.parametrize("name", [fault.name for fault in faults().values() if fault.speculation])
def test_a_fault_of_a_worker_belongs_to_no_other(name: str) -> None:
    fault = faults()[name]
    for mode in (None, "v2" if fault.speculation == "v1" else "v1"):
        with pytest.raises(RelayError, match=f"{name} belongs to speculation {fault.speculation}, .* is "):
            choose(fault.states[0], {}).broken_by(
                fault, overlap=fault.loops == ("overlapped",), speculation=mode
            )


@FAULTS
def test_it_belongs_nowhere_else(fault: Fault) -> None:
    others = [state for state in states() if state not in fault.states]
    for state in others:
        with pytest.raises(
            RelayError, match=f"fault {fault.name} belongs to {fault.states[0]}.*not to {state}"
        ):
            choose(state, {}).broken_by(fault, overlap=True)
    if len(fault.loops) == 1:
        with pytest.raises(RelayError, match=f"belongs to the {fault.loops[0]} loop"):
            choose(fault.states[0], {}).broken_by(fault, overlap=fault.loops == ("serial",))


def test_names_and_references_are_those_of_a_list() -> None:
    entries = [*faults().values(), *awaited_faults().values()]
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.name)
        assert re.match(r"(4\.10|5\.\d+), ", entry.reference)
        assert entry.about.endswith(".")


def test_every_known_bug_is_there_or_waited_for() -> None:
    """But 5.25's other half: an attribute that is no field here."""
    entries = [*faults().values(), *awaited_faults().values()]
    found = {number for entry in entries for number in re.findall(r"^5\.(\d+)", entry.reference)}
    numbers = set(map(int, found))
    assert numbers == set(range(1, 27))


def test_a_switch_may_have_done_it_already() -> None:
    with pytest.raises(RelayError, match="no-barrier changes nothing in pr25945 as it is switched here"):
        choose("pr25945", {"barrier": "off"}).broken_by(faults()["no-barrier"], overlap=True)


def test_a_policy_that_keeps_something_is_made_for_each_run() -> None:
    broken = choose("pr25945", {}).broken_by(faults()["staging-refilled"], overlap=True)
    assert broken.row(overlap=True).staging is not broken.row(overlap=True).staging
    assert broken.policies(overlap=True)["staging"] == "refilled"


def test_faults_add_up() -> None:
    choice = choose("pr25945", {})
    for name in ("no-barrier", "gather-without-stash"):
        choice = choice.broken_by(faults()[name], overlap=True)
    changed = difference(choose("pr25945", {}).row(overlap=True), choice.row(overlap=True))
    assert changed.keys() == {"barrier", "stash"}
