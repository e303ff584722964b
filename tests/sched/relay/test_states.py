"""States are rows with an answer to every question; switches change exactly the answers they name."""

from __future__ import annotations

from dataclasses import fields

import pytest

from schedbench.sched.relay import lengths, ordering, penalties, prompt, tokens
from schedbench.sched.relay.row import Row
from schedbench.sched.relay.states import RelayError, State, choose, states, switches

QUESTIONS = [field.name for field in fields(Row)]
STATES = pytest.mark.parametrize("state", states().values(), ids=states().keys())


def difference(before: Row, after: Row) -> set[str]:
    return {name for name in QUESTIONS if getattr(before, name) is not getattr(after, name)}


@STATES
@pytest.mark.parametrize("overlap", [True, False])
def test_every_question_has_an_answer(state: State, overlap: bool) -> None:
    row = choose(state.name, {}).row(overlap=overlap)
    for question in QUESTIONS:
        answer = getattr(row, question)
        assert (
            answer in ("pageable", "pinned", "packed") if question == "sampling_tensors" else callable(answer)
        )


@STATES
def test_a_state_says_what_it_is(state: State) -> None:
    assert state.about and states()[state.name] is state
    assert state.defaults.keys() == switches().keys()
    assert all(value in switches()[switch] for switch, value in state.defaults.items())


@STATES
@pytest.mark.parametrize("switch", switches())
def test_a_default_spelled_out_changes_nothing(state: State, switch: str) -> None:
    chosen = choose(state.name, {switch: state.defaults[switch]})
    for overlap in (True, False):
        assert not difference(choose(state.name, {}).row(overlap=overlap), chosen.row(overlap=overlap))
    assert chosen.switches == state.defaults


@pytest.mark.parametrize(
    ("switch", "value", "question", "answer"),
    [
        ("barrier", "off", "barrier", ordering.no_barrier),
        ("staging", "pageable", "stage_prompt", prompt.stage_pageable),
        ("sampling_tensors", "pinned", "sampling_tensors", "pinned"),
        ("sampling_tensors", "packed", "sampling_tensors", "packed"),
        ("dead_publish", "off", "publish", ordering.nothing),
        ("penalties", "exact", "penalty_tokens", penalties.OnDevice),
    ],
)
def test_a_switch_changes_the_answer_it_names(switch: str, value: str, question: str, answer: object) -> None:
    before = choose("pr25945", {}).row(overlap=True)
    after = choose("pr25945", {switch: value}).row(overlap=True)
    assert difference(before, after) == {question}
    assert getattr(after, question) == answer


@pytest.mark.parametrize("switch", ["barrier", "dead_publish"])
def test_switches_of_streams_mean_nothing_to_one_stream(switch: str) -> None:
    plain = choose("pr25945", {}).row(overlap=False)
    assert not difference(plain, choose("pr25945", {switch: "off"}).row(overlap=False))
    assert not difference(
        plain, choose("pr25945", {switch: states()["pr25945"].defaults[switch]}).row(overlap=False)
    )


def test_serial_is_the_same_state_on_one_stream() -> None:
    chosen = choose("pr25945", {})
    changed = {"barrier", "isolate", "advance", "publish", "keep_alive"}
    assert difference(chosen.row(overlap=True), chosen.row(overlap=False)) == changed
    assert chosen.row(overlap=False).advance is lengths.advance_in_place


def test_latest_is_25945_with_two_better_answers() -> None:
    for overlap in (True, False):
        before, after = (choose(name, {}).row(overlap=overlap) for name in ("pr25945", "latest"))
        assert difference(before, after) == {"penalty_tokens", "resolve"}
    assert after.resolve is tokens.resolve_late_recorded
    assert states()["pr25945"].known_hazards and not states()["latest"].known_hazards


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("pr1", {}, "no relay state 'pr1'; there are .*pr25945"),
        ("latest", {"bariere": "off"}, "no relay switch 'bariere'; there are barrier, staging"),
        ("latest", {"barrier": "no"}, "relay switch barrier is one of off, top, not 'no'"),
    ],
)
def test_what_does_not_exist_is_named(name: str, overrides: dict[str, str], message: str) -> None:
    with pytest.raises(RelayError, match=message):
        choose(name, overrides)


def test_a_choice_knows_all_its_switches() -> None:
    chosen = choose("latest", {"barrier": "off"})
    assert chosen.switches == {**states()["latest"].defaults, "barrier": "off"}
