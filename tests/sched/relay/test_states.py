"""A state is a row with a policy for every question; a switch changes exactly the questions that it names."""

from __future__ import annotations

from dataclasses import fields

import pytest

from schedbench.sched.relay import lengths, ordering, penalties, prebuilt, tokens
from schedbench.sched.relay.choice import RelayError, choose, difference
from schedbench.sched.relay.names import ALIASES, SWITCH_VALUES
from schedbench.sched.relay.row import RelayRow, Speculation
from schedbench.sched.relay.states import State, states

QUESTIONS = [field.name for field in fields(RelayRow)]
STATES = pytest.mark.parametrize("state", states().values(), ids=states().keys())
WORDS = {"sampling_tensors": ("pageable", "pinned", "packed"), "preparation": ("split", "fused")}


@STATES
def test_every_question_has_an_answer(state: State) -> None:
    for overlap in (True, False):
        row = choose(state.name, {}).row(overlap=overlap)
        for question in QUESTIONS:
            answer = getattr(row, question)
            assert answer in WORDS[question] if question in WORDS else callable(answer)


@STATES
def test_a_state_describes_itself(state: State) -> None:
    assert state.about and state.expect and states()[state.name] is state
    assert state.before is None or state.before in states()
    assert state.defaults.keys() == SWITCH_VALUES.keys()
    assert all(value in SWITCH_VALUES[switch] for switch, value in state.defaults.items())


@STATES
def test_a_default_spelled_out_changes_nothing(state: State) -> None:
    for switch, default in state.defaults.items():
        chosen = choose(state.name, {switch: default})
        for overlap in (True, False):
            assert not difference(choose(state.name, {}).row(overlap=overlap), chosen.row(overlap=overlap))
        assert chosen.switches == state.defaults


@STATES
def test_a_value_other_than_the_default_changes_the_row(state: State) -> None:
    for switch, values in SWITCH_VALUES.items():
        for value in values:
            if value != state.defaults[switch] and (switch, value) not in state.refuses:
                assert changed(state.name, {switch: value}), (switch, value)


def changed(name: str, overrides: dict[str, str]) -> set[str]:
    """Returns the questions whose policies a switch changes, those of the overlapped speculative worker among them."""
    plain, other = choose(name, {}), choose(name, overrides)
    drafts, otherwise = plain.draft_row("v2"), other.draft_row("v2")
    assert drafts is not None and otherwise is not None
    rows = difference(plain.row(overlap=True), other.row(overlap=True))
    return {*rows, *difference(drafts, otherwise)}


@pytest.mark.parametrize(
    ("switch", "value", "answers"),
    [
        ("barrier", "off", {"barrier": ordering.no_barrier}),
        (
            "barrier",
            "after-launch",
            {"barrier": ordering.no_barrier, "reads_done": ordering.barrier_after_launch},
        ),
        (
            "barrier",
            "read-done",
            {
                "barrier": ordering.no_barrier,
                "reads_done": ordering.wait_until_read,
                "pages": ordering.own_pages,
                "read_tables": ordering.copy_tables,
            },
        ),
        ("flatten", "list", {"flatten": tokens.flatten_list}),
        ("staging", "pageable", {"staging": tokens.pageable}),
        ("sampling_tensors", "pinned", {"sampling_tensors": "pinned"}),
        ("sampling_tensors", "packed", {"sampling_tensors": "packed"}),
        ("dead_publish", "off", {"publish": ordering.nothing}),
        ("penalties", "exact", {"penalty_tokens": penalties.AfterSampling}),
        ("backup_indices", "pinned", {"backup_indices": prebuilt.upload_indices_pinned}),
        ("backup_indices", "none", {"backup_indices": prebuilt.no_indices}),
        ("preparation", "fused", {"preparation": "fused"}),
    ],
)
def test_a_switch_changes_the_answers_it_names(switch: str, value: str, answers: dict[str, object]) -> None:
    before = choose("pr25945", {}).row(overlap=True)
    after = choose("pr25945", {switch: value}).row(overlap=True)
    assert difference(before, after).keys() == answers.keys()
    assert {question: getattr(after, question) for question in answers} == answers


@pytest.mark.parametrize("switch", ["barrier", "dead_publish"])
def test_stream_switches_change_nothing_on_one_stream(switch: str) -> None:
    plain = choose("pr25945", {}).row(overlap=False)
    assert not difference(plain, choose("pr25945", {switch: "off"}).row(overlap=False))


def test_serial_is_the_same_state_on_one_stream() -> None:
    chosen = choose("pr25945", {})
    changed = {"barrier", "isolate", "advance", "publish", "keep_alive"}
    assert difference(chosen.row(overlap=True), chosen.row(overlap=False)).keys() == changed
    assert chosen.row(overlap=False).advance is lengths.advance_in_place


@pytest.mark.parametrize("name", [name for name in states() if name not in ("pr25945", "latest")])
def test_the_serial_loop_has_no_relay_before_25945(name: str) -> None:
    row = choose(name, {}).row(overlap=False)
    assert row.stash is tokens.stash_nothing
    assert row.resolve is ordering.nothing


# The changes to the overlapped loop by each pull request, or between two of them.
STEPS = {
    "pr25774": {
        "prepare_input",
        "mix",
        "conclude",
        "conclude_blocks",
        "filter",
        "merge",
        "bootstrap",
        "prebuild",
    },
    "pr25944-before": {"futures", "open", "stash", "filter"},
    "pr25944": {
        "advance",
        "allocation_lengths",
        "mix",
        "resolve",
        "publish",
        "conclude",
        "buffer_lengths",
        "prebuild",
    },
    "pr26020": {"advance", "allocation_lengths", "mix", "resolve", "conclude", "buffer_lengths", "prebuild"},
    "pr26425-before": {"flatten"},
    "pr26425": {"host_indices"},
    "pr25945-before": {"barrier"},
    "pr25945": {
        "stage_prompt",
        "mix",
        "isolate",
        "resolve",
        "resolve_prompt",
        "rebuild_prompt",
        "conclude",
        "merge",
        "bootstrap",
        "prebuild",
    },
    "latest": {
        "pages",
        "barrier",
        "stage_prompt",
        "rebuild_prompt",
        "preparation",
        "penalty_tokens",
        "sampling_tensors",
        "resolve",
        "resolve_prompt",
        "read_tables",
        "publish",
        "reads_done",
        "bootstrap",
        "prebuild",
        "backup_indices",
    },
}


@pytest.mark.parametrize("name", [name for name in states() if states()[name].before])
def test_a_state_differs_from_the_one_before_by_its_pull_request(name: str) -> None:
    state = states()[name]
    assert state.before is not None
    assert difference(states()[state.before].overlapped, state.overlapped).keys() == STEPS[name]


def test_26020_reverts_25944_except_for_the_dead_publish() -> None:
    before, after = (choose(name, {}).row(overlap=True) for name in ("pr25944-before", "pr26020"))
    assert difference(before, after) == {"publish": ("nothing", "publish_next_lengths")}


def test_the_state_before_a_pull_request_may_be_that_after_another() -> None:
    assert ALIASES["pr26020-before"] == "pr25944"
    assert choose("pr26020-before", {}).state is states()["pr25944"]


def test_switches_close_the_gaps_between_pull_requests() -> None:
    """A change between two states that no pull request of the ladder made is reached by a switch."""
    ringless = choose("pr25774", {"index": "pool"}).row(overlap=True)
    assert difference(ringless, states()["pr25944-before"].overlapped).keys() == {"filter"}
    flat = choose("pr26020", {"flatten": "numpy"}).row(overlap=True)
    assert not difference(flat, states()["pr26425-before"].overlapped)
    free = choose("pr25945-before", {"barrier": "off"}).row(overlap=True)
    assert not difference(free, states()["pr26425"].overlapped)


@pytest.mark.parametrize(
    ("name", "barrier", "speculation", "hazards"),
    [
        ("pr25774", "off", None, ["slot reuse", "page-table rewrite"]),
        ("pr25774", "after-launch", None, []),
        ("pr25944", "off", None, ["slot reuse", "page-table rewrite"]),
        ("pr25945-before", "top", None, ["page-table rewrite", "dead publish"]),
        ("pr25945", "top", None, ["page-table rewrite", "dead publish"]),
        ("pr25945", "read-done", None, ["dead publish"]),
        ("latest", "read-done", None, []),
        ("pr26425", "off", "v2", ["slot reuse", "page-table rewrite"]),
        ("pr25945", "top", "v2", ["page-table rewrite"]),
        ("pr25945", "off", "v2", ["slot reuse", "page-table rewrite", "penalty state"]),
        ("latest", "off", "v2", ["slot reuse", "page-table rewrite", "draft lengths"]),
        ("latest", "read-done", "v2", []),
    ],
)
def test_upstreams_races_are_declared(
    name: str, barrier: str, speculation: Speculation | None, hazards: list[str]
) -> None:
    chosen = choose(name, {"barrier": barrier})
    assert [one.partition(":")[0] for one in chosen.known_hazards(speculation=speculation)] == hazards
    assert chosen.known_hazards(overlap=False, speculation="v2") == ()


def test_policies_are_listed_by_name() -> None:
    named = choose("latest", {}).policies(overlap=True)
    assert list(named) == QUESTIONS
    assert named["resolve"] == tokens.resolve_fused.__name__
    assert named["preparation"] == "fused"
    assert choose("pr25945", {}).policies(overlap=True)["penalty_tokens"] == "known_to_the_host"


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("pr1", {}, "no relay state 'pr1'; there are .*pr25945.*pr26020-before"),
        ("latest", {"bariere": "off"}, "no relay switch 'bariere'; there are barrier, flatten"),
        ("latest", {"barrier": "no"}, "relay switch barrier is one of off, top, .*, not 'no'"),
        ("pr25944-before", {"index": "ring"}, "pr25944-before with index=ring: the ring ended"),
        ("latest", {"index": "ring"}, "latest with index=ring: the ring ended"),
        ("pr25944", {"dead_publish": "off"}, "pr25944 with dead_publish=off: here publish is not dead"),
        ("pr26020-before", {"preparation": "fused"}, "pr26020-before with preparation=fused: .* sentinels"),
    ],
)
def test_impossible_choices_are_refused_by_name(name: str, overrides: dict[str, str], message: str) -> None:
    with pytest.raises(RelayError, match=message):
        choose(name, overrides)


def test_a_choice_lists_all_its_switches() -> None:
    chosen = choose("latest", {"barrier": "off"})
    assert chosen.switches == {**states()["latest"].defaults, "barrier": "off"}
