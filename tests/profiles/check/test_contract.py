"""The relay's contract on hand-made batches: every state keeps it under any sequence of actions, and changed policies
that break it are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedbench.profiles.check.contract import (
    ANY_PROMPT,
    BARE_SIDE,
    BatchAction,
    check_contract,
    followed,
)
from schedbench.profiles.check.scripted_engine import ScriptedEngine
from schedbench.sched.relay import lengths, ordering, tokens
from schedbench.sched.relay.choice import RelayChoice, choose
from schedbench.sched.relay.names import SWITCH_VALUES
from schedbench.sched.relay.row import RelayRow
from schedbench.sched.relay.states import states
from tests.profiles.check.conftest import acts_with

ROWS_OF_STATES = [(state, overlap) for state in states() for overlap in (True, False)]
EACH = pytest.mark.parametrize(("state", "overlap"), ROWS_OF_STATES)

scripts = st.lists(acts_with("prefill", "mix"), min_size=2, max_size=14)


def kept(choice: RelayChoice, *, overlap: bool):
    return check_contract(
        lambda: choice.row(overlap=overlap), overlap=overlap, declared=choice.state.known_defects
    )


@EACH
def test_every_state_keeps_the_contract(state: str, overlap: bool) -> None:
    found = kept(choose(state, {}), overlap=overlap)
    assert found.broken == ()
    if overlap:
        assert found.known == states()[state].known_defects


@settings(max_examples=160, derandomize=True)
@given(row=st.sampled_from(ROWS_OF_STATES), script=scripts)
def test_the_contract_holds_for_random_actions(row: tuple[str, bool], script: list[BatchAction]) -> None:
    state, overlap = row
    assert followed(ScriptedEngine(choose(state, {}).row(overlap=overlap), overlap=overlap), script) == []


@pytest.mark.wide
@pytest.mark.parametrize("state", ["pr25774", "pr25945", "latest"])
@pytest.mark.parametrize("switch", SWITCH_VALUES)
def test_no_switch_breaks_the_contract(state: str, switch: str) -> None:
    refused = states()[state].refuses
    for value in SWITCH_VALUES[switch]:
        if (switch, value) not in refused:
            assert kept(choose(state, {switch: value}), overlap=True).broken == ()


def promises_broken_by(row: RelayRow) -> set[str]:
    return {violation.promise for violation in check_contract(lambda: row, overlap=True).broken}


def test_an_undeclared_defect_is_a_violation() -> None:
    row = choose("pr25945-before", {}).row(overlap=True)
    assert promises_broken_by(row) == {ANY_PROMPT, BARE_SIDE}


def broken_by(state: str = "pr25945", /, **policies: object) -> dict[str, str]:
    """Returns the promises that a changed row breaks in addition to its state's declared defects, with the first
    evidence of each."""
    choice = choose(state, {})
    row: RelayRow = replace(choice.row(overlap=True), **policies)
    found = check_contract(lambda: row, overlap=True, declared=choice.state.known_defects)
    return {violation.promise: violation.says for violation in reversed(found.broken)}


def test_another_defect_with_bare_sides_is_not_the_declared_one() -> None:
    def merge_by_guess(context, batch, other):  # noqa: ARG001
        if batch.input_ids is None:
            batch.input_ids = torch.zeros(batch.batch_size, dtype=torch.int64)
        if other.input_ids is None:
            other.input_ids = torch.zeros(other.batch_size, dtype=torch.int64)
        batch.input_ids = torch.cat([batch.input_ids, other.input_ids])

    assert not broken_by("pr25945-before")
    assert "was sampled for it" in broken_by("pr25945-before", merge=merge_by_guess)[BARE_SIDE]


def test_another_defect_with_prompts_is_not_the_declared_one() -> None:
    """Ids above zero are replaced, or the prompt is refused."""
    before = choose("pr25945-before", {}).row(overlap=True).resolve

    def shift(context, batch):
        before(context, batch)
        if batch.forward_mode.is_extend and int(batch.input_ids[-1]) == 8:
            batch.input_ids = batch.input_ids + 1

    def refuse(context, batch):
        if batch.forward_mode.is_extend and int(batch.input_ids[-1]) == 8:
            raise ValueError("no room")
        before(context, batch)

    assert "the prompt's token is 8, not 7" in broken_by("pr25945-before", resolve=shift)[ANY_PROMPT]
    assert "ValueError: no room" in broken_by("pr25945-before", resolve=refuse)[ANY_PROMPT]


# ---- changed rows ----------------------------------------------------------------------------------


def test_lengths_that_do_not_advance_are_reported_by_request() -> None:
    violations = broken_by(advance=ordering.nothing)
    assert violations["mirrors equal the requests' values"].startswith(
        "decoding: the running batch after step 1: seq_lens_cpu is 5 for request r0, which has 6"
    )


def test_device_lengths_that_lag_are_reported() -> None:
    violations = broken_by(advance=lengths.advance_host_side)
    assert (
        "seq_lens of request r0 is 5 on the device and 6 in seq_lens_cpu"
        in violations["mirrors equal device values"]
    )


@pytest.mark.parametrize("state", ["pr25944", "pr26425"])
def test_allocation_lengths_are_compared_for_any_policy(state: str) -> None:
    """A separate policy that does what the fault ``allocate-by-sentinel`` does."""

    def of_the_batch(context, batch):  # noqa: ARG001
        return batch.seq_lens

    row = replace(choose(state, {}).row(overlap=True), allocation_lengths=of_the_batch)
    allocated = "slots are allocated by the host's lengths"
    assert (allocated in promises_broken_by(row)) == (state == "pr25944")

    stale = replace(row, advance=lengths.advance_host_side)
    if state == "pr26425":
        assert "mirrors equal device values" in promises_broken_by(stale)


def test_tokens_in_another_order_are_reported() -> None:
    def reversed_mix(context, prefill, running):  # noqa: ARG001
        prefill.mix_running_indices = running.req_pool_indices.flip(0)

    violations = broken_by(mix=reversed_mix)
    assert violations["a step is fed the tokens that were sampled"].startswith(
        "mixing: step 2, request r0, position 6: "
    )


def test_a_wrongly_filtered_batch_is_reported() -> None:
    """The batch carries its own tokens and loses the wrong ones."""

    def keep_first(context, batch, keep):  # noqa: ARG001
        if batch.input_ids is not None:
            batch.input_ids = batch.input_ids[: keep.shape[0]]

    def conclude_with_tokens(context, batch, result):  # noqa: ARG001
        batch.input_ids = result.next_token_ids.clone()

    violations = broken_by(filter=keep_first, conclude=conclude_with_tokens)
    assert violations["a step is fed the tokens that were sampled"].startswith("leaving: ")


def test_a_write_without_rows_is_reported() -> None:
    def stash_first(context, future, token_ids):
        context.futures.output_tokens_buf[: token_ids.shape[0]] = token_ids
        tokens.stash_by_row(context, future, token_ids)

    assert broken_by(stash=stash_first)["a step without requests changes nothing"] == (
        "a step without requests writes to output_tokens_buf"
    )
