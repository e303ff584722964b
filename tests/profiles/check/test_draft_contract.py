"""The relay's contract with speculative workers, on hand-made batches: every state keeps it, and wrong policies are
found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedbench.profiles.check.batch_invariants import PROMPTS
from schedbench.profiles.check.contract import (
    BatchAction,
    ContractResult,
    check_contract,
    followed,
    speculating,
)
from schedbench.profiles.check.draft_invariants import LEFT, LENGTHS
from schedbench.profiles.check.scripted_drafts import TAUGHT, VERIFIED, DraftSetup
from schedbench.profiles.check.scripted_engine import ScriptedEngine
from schedbench.sched.relay import drafts, lengths
from schedbench.sched.relay.choice import RelayChoice, choose
from schedbench.sched.relay.row import Speculation
from schedbench.sched.relay.states import states
from tests.profiles.check.conftest import acts_with

WORKERS: list[tuple[Speculation, bool]] = [("v1", False), ("v2", False), ("v2", True)]
EACH = pytest.mark.parametrize(
    ("state", "mode", "overlap"), [(state, *worker) for state in states() for worker in WORKERS]
)

scripts = st.lists(acts_with("prefill"), min_size=2, max_size=14)


def kept(choice: RelayChoice, mode: Speculation, *, overlap: bool, **answers: Any) -> ContractResult:
    """``answers`` replace policies of the state."""

    def made() -> DraftSetup:
        own = speculating(choice, mode)
        return own._replace(row=replace(own.row, **answers))

    row = partial(choice.row, overlap=overlap, speculation=mode)
    return check_contract(row, overlap=overlap, declared=choice.state.known_defects, drafts=made)


@EACH
def test_every_state_keeps_the_draft_contract(state: str, mode: Speculation, overlap: bool) -> None:
    assert kept(choose(state, {}), mode, overlap=overlap).broken == ()


@pytest.mark.wide
@settings(max_examples=80, derandomize=True)
@given(
    state=st.sampled_from(["pr25774-before", "pr25944", "pr26020", "pr25945", "latest"]),
    worker=st.sampled_from(WORKERS),
    script=scripts,
)
def test_the_draft_contract_holds_for_random_actions(
    state: str, worker: tuple[Speculation, bool], script: list[BatchAction]
) -> None:
    (mode, overlap), choice = worker, choose(state, {})
    row = choice.row(overlap=overlap, speculation=mode)
    scripted = ScriptedEngine(row, overlap=overlap, drafts=speculating(choice, mode))
    assert followed(scripted, script) == []


@pytest.mark.parametrize("value", ["blocking", "private", "bound"])
def test_the_draft_contract_holds_for_every_policy_of_host_lengths(value: str) -> None:
    assert kept(choose("pr25945", {"seq_lens_cpu": value}), "v2", overlap=True).broken == ()


# ---- wrong policies, one for each question ------------------------------------------------------------------------


def rotate_nothing(context: Any, batch: Any, next_ids: Any, extend_lens: Any) -> torch.Tensor:  # noqa: ARG001
    ids: torch.Tensor = batch.input_ids
    return ids


def keep_first(context: Any, batch: Any, rows: torch.Tensor, before: int) -> None:
    drafts.filter_future(context, batch, torch.arange(rows.shape[0]), before)


def keep_first_draft(context: Any, batch: Any, rows: torch.Tensor, before: int) -> None:
    drafts.filter_draft(context, batch, torch.arange(rows.shape[0]), before)


def merge_behind(context: Any, batch: Any, other: Any) -> None:
    """The other batch's rows come first."""
    own, batch.spec_info = batch.spec_info, other.spec_info
    other.spec_info = own
    drafts.merge_future(context, batch, other)


def one_short(context: Any, batch: Any, count: int) -> Any:
    return lengths.step_lens_uploaded(context, batch, count - 1)


def not_grown(context: Any, batch: Any, count: int) -> torch.Tensor:  # noqa: ARG001
    lens: torch.Tensor = batch.seq_lens
    return lens


def lengths_before(context: Any, batch: Any, new: Any) -> None:  # noqa: ARG001
    """Publishes the lengths of the previous step."""
    lengths.publish_lengths(context, batch, batch.seq_lens)


def stash_tokens_alone(context: Any, future: Any, draft: Any) -> None:
    """The draft state of the first step is never replaced."""
    if context.draft_buffers is None:
        drafts.stash_by_row(context, future, draft)
    context.futures.stash(future.indices, draft.bonus_tokens)


def lag(context: Any, batch: Any) -> None:
    lengths.lengths_gathered_and_downloaded(context, batch)
    if batch.spec_info is not None and batch.has_host_lengths:
        batch.seq_lens_cpu = batch.seq_lens_cpu - 1


WRONG: list[tuple[Speculation, str, Any, str]] = [
    ("v2", "rotate", rotate_nothing, PROMPTS),
    ("v2", "filter", keep_first, LEFT),
    ("v2", "merge", merge_behind, VERIFIED),
    ("v2", "step_lens", one_short, TAUGHT),
    ("v2", "draft_lengths", not_grown, TAUGHT),
    ("v2", "publish", lengths_before, VERIFIED),
    ("v2", "stash", stash_tokens_alone, LEFT),
    ("v2", "host_lengths", lag, LENGTHS),
    ("v1", "rotate", rotate_nothing, PROMPTS),
    ("v1", "filter", keep_first_draft, TAUGHT),
]


@pytest.mark.parametrize(
    ("mode", "asked", "answer", "promise"),
    WRONG,
    ids=lambda value: getattr(value, "__name__", str(value)[:24]),
)
def test_a_wrong_policy_breaks_a_promise(mode: Speculation, asked: str, answer: Any, promise: str) -> None:
    found = kept(choose("pr26425", {}), mode, overlap=mode == "v2", **{asked: answer})
    promises = {violation.promise: violation for violation in found.broken}
    assert promise in promises, promises
    assert "request r" in promises[promise].says
