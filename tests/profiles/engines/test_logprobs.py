"""Log probabilities that an engine returns: ``check`` compares them with our own scheduler's, and ``compare`` with the
other side's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from schedbench.profiles.check import tokens
from schedbench.profiles.judge.conclusion import divergence_text
from schedbench.profiles.judge.likeness import LOGPROB_ERROR, first_divergence, same_tokens, value_differences
from schedbench.profiles.platform.resolve import Resolved, ask
from schedbench.profiles.record.result import Result

from .conftest import SMALL, Scripted, run

SHIFTED = """
from schedbench.sched.loop import settle

def shifted(batch, result):
    keep(batch, result)
    for req in batch.reqs:
        if req.id == "r1" and len(req.{values}) > {place} and not done:
            req.{values}[{place}] += {by}
            done.append(req)

done = []
keep, settle.{function} = settle.{function}, shifted
"""
OF_OUTPUT = {"values": "output_logprobs", "place": 1, "function": "_keep_logprobs"}
OF_PROMPT = {"values": "prompt_logprobs", "place": 2, "function": "_keep_prompt_logprobs"}


@pytest.fixture(scope="module")
def asked() -> Resolved:
    scored = [f"workload.sampling.{name}=true" for name in ("logprobs", "prompt_logprobs")]
    return ask("mixed", [*SMALL, "device.values=real", *scored])


@pytest.fixture(scope="module")
def own(asked: Resolved) -> Result:
    found = tokens.reference(asked)
    assert isinstance(found, Result)
    return found


def shifted(by: float | str) -> str:
    return SHIFTED.format(**OF_OUTPUT | {"by": by})


def said(found: Result, expected: Result) -> Sequence[str]:
    return [one.says for one in tokens.differences(found, expected)]


def log_probability(result: Result, place: int) -> float:
    [row] = [row for row in result.requests if row.id == "r1"]
    return row.kept_logprobs[place]


def test_another_log_probability_is_named_with_its_token(
    asked: Resolved, own: Result, scripted: Scripted
) -> None:
    found = run(asked, scripted(shifted(-0.15)))
    [row] = [row for row in own.requests if row.id == "r1"]
    right = log_probability(own, row.prompt_tokens)
    what = "request r1: log probability of output token 1 is"
    assert said(found, own) == [f"{what} {right - 0.15:.6g}, the other {right:.6g}"]
    where = first_divergence(own, found, seed=3)
    assert where is not None
    assert (
        divergence_text(where)
        == f"outputs differ, first with seed 3: {what} {right:.6g}, the other {right - 0.15:.6g}"
    )


def test_another_log_probability_of_the_prompt_is_named(
    asked: Resolved, own: Result, scripted: Scripted
) -> None:
    found = run(asked, scripted(SHIFTED.format(**OF_PROMPT | {"by": 0.5})))
    [says] = said(found, own)
    right = log_probability(own, 2)
    assert (
        says == f"request r1: log probability of prompt token 3 is {right + 0.5:.6g}, the other {right:.6g}"
    )


@pytest.mark.parametrize(
    ("by", "alike"), [(LOGPROB_ERROR / 2, True), (LOGPROB_ERROR * 2, False), ("1e999", False)]
)
def test_an_engine_may_round_otherwise(
    asked: Resolved, own: Result, scripted: Scripted, by: float | str, alike: bool
) -> None:
    found = run(asked, scripted(shifted(by)))
    assert found.outputs != own.outputs
    assert (not said(found, own), first_divergence(found, own, seed=0) is None) == (alike, alike)


def test_our_own_scheduler_may_not(own: Result) -> None:
    other = own.requests[1]
    assert other.id == "r1"
    values = (*other.kept_logprobs[:-1], other.kept_logprobs[-1] + 1e-9)
    rows = (own.requests[0], other.model_copy(update={"kept_logprobs": values}))
    outputs = own.outputs.model_copy(update={"digest": "0" * 64})  # type: ignore[union-attr]
    assert said(own.model_copy(update={"requests": rows, "outputs": outputs}), own)


def test_two_runs_of_one_source_have_equal_log_probabilities(asked: Resolved, scripted: Scripted) -> None:
    first, second = (run(asked, scripted("")) for _ in range(2))
    assert first.outputs == second.outputs
    assert first.requests[0].kept_logprobs == second.requests[0].kept_logprobs != ()


def test_a_document_has_no_log_probabilities_of_its_own(own: Result) -> None:
    assert own.requests[0].token_ids and own.requests[0].kept_logprobs
    assert "kept_logprobs" not in own.document()["requests"][0]


def test_a_difference_beside_equal_log_probabilities_is_no_equality(own: Result) -> None:
    """Such as a tag of KV that does not add up, which only the digest has."""
    damaged = own.model_copy(update={"outputs": own.outputs.model_copy(update={"digest": "0" * 64})})
    assert not same_tokens(own, damaged)
    [said] = value_differences(own, damaged)
    assert said.startswith("what differs was not kept")
