"""A wrong draft changes no token. Its input is compared with the expected one, and differences are reported with their
place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedbench.profiles.check.drafts import NAME, check_drafts, reference_drafts
from schedbench.profiles.check.examine import Examiner
from schedbench.profiles.check.invariants import Invariants
from schedbench.profiles.check.report import Check
from schedbench.profiles.check.tokens import differences, promised
from schedbench.profiles.platform.resolve import Resolved
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.sched.batch import DraftState
from schedbench.sched.relay import drafts
from schedbench.sched.relay.faults import Fault, unchanged
from schedbench.sched.relay.row import DraftRow
from schedbench.sched.relay.states import states
from schedbench.sched.speculate.drafter import Drafter, VerifiedChains
from tests.acceptance.runs import resolved, result_of

EAGLE = ("model.preset=tiny-llama-eagle", "engine.mixed_chunk=false", "workload.requests=4")
V2 = "engine.speculative={algorithm: eagle, mode: v2}"
WORKERS = {
    "v2": (V2, "engine.overlap=true"),
    "v2 serial": (V2, "engine.overlap=false"),
    "v1": ("engine.speculative={algorithm: eagle, mode: v1}", "engine.overlap=false"),
    "tree": (
        "engine.speculative={algorithm: eagle, mode: v1, topk: 2, draft_tokens: 6}",
        "engine.overlap=false",
    ),
}
Change = Callable[[DraftRow], DraftRow]

pytestmark = pytest.mark.usefixtures("nothing_unproven")


def question(*overrides: str, state: str = "latest", worker: str = "v2") -> Resolved:
    return resolved("faults/mixing", *EAGLE, *WORKERS[worker], f"engine.relay={state}", *overrides)


def checked(resolved: Resolved) -> Check:
    return check_drafts(resolved, lambda: reference_drafts(resolved))


def violations(resolved: Resolved) -> dict[str, str]:
    """Runs in program order; returns the fields that broke a promise, with the evidence."""
    guard = Invariants()
    execute(resolved, Options(device="vgpu"), guard=guard)
    return {violation.field: violation.says for violation in guard.violations()}


def broken(resolved: Resolved, change: Change) -> Resolved:
    """Replaces a policy of speculation."""
    [relay] = resolved.relays
    fault = Fault("wrong", "Wrong.", "none", (relay.state.name,), ("overlapped",), unchanged, "v2", change)
    return replace(resolved, relays=(relay.broken_by(fault, overlap=True, speculation="v2"),))


@pytest.mark.parametrize(
    ("state", "worker"),
    [
        ("pr25944", "v2"),
        ("latest", "v1"),
        *(
            pytest.param(state, worker, marks=pytest.mark.wide)
            for state, worker in (("pr25774-before", "v2"), ("pr25945", "v2 serial"), ("pr25945", "tree"))
        ),
    ],
)
def test_drafts_agree_in_every_state_and_worker(state: str, worker: str) -> None:
    found = checked(question(state=state, worker=worker))
    assert (found.verdict, found.evidence) == ("passed", ())
    assert "requests: 4" in found.about


@pytest.mark.wide
@pytest.mark.parametrize("state", states())
def test_a_draft_starts_from_the_state_of_the_last_extend(state: str) -> None:
    assert violations(question(state=state)) == {}


def test_the_check_does_not_apply_to_simulated_acceptance_and_lagging_penalties() -> None:
    assert checked(question("engine.speculative.acceptance={mean: 2.5}")).verdict == "not applicable"
    penalised = question("workload.sampling.presence_penalty=0.5", state="pr25945")
    assert checked(penalised).verdict == "not applicable"


def test_no_tokens_are_promised_where_penalties_lag_or_begin_anew(tmp_path: Path) -> None:
    serial = ("engine.overlap=false", "engine.relay=pr25945")
    assert promised(resolved("penalties", *serial))
    assert not promised(resolved("penalties", *serial), retracted=True)
    trace, scenario = tmp_path / "trace.jsonl", tmp_path / "traced.yaml"
    trace.write_text('{"input_length": 4, "output_length": 2, "sampling": {"presence_penalty": 1}}\n')
    given = "workload: {trace: trace.jsonl, format: jsonl}\n"
    scenario.write_text(f"name: traced\nmodel: {{preset: tiny-llama}}\n{given}")
    assert not promised(resolved(scenario, "engine.relay=pr25945"))
    assert promised(resolved(scenario, *serial))


@pytest.mark.wide
def test_aborted_requests_are_no_difference() -> None:
    """A verify reports several tokens at once, so the aborted request of one run may have more of them."""
    leaving = question("workload.abort={fraction: 0.5, after_tokens: 3}")
    checks = Examiner(leaving, ()).examine(leaving.relays[0]).checks
    assert {check.name: check.evidence for check in checks if check.verdict == "failed"} == {}


def test_an_abort_that_comes_late_is_a_difference() -> None:
    few = ("device.values=none", "workload.requests=2", "measure.warmup_requests=0")
    early, late = (
        result_of("mixed", *few, f"workload.abort={{fraction: 1, after_tokens: {n}}}") for n in (2, 3)
    )
    assert [one.says[:26] for one in differences(late, early)] == [
        "request r0, output token 2",
        "request r1, output token 2",
    ]
    assert not [*differences(early, early)]


# ---- wrong in every order ----------------------------------------------------------------------------------


def of_a_neighbour(field: str) -> Callable[..., None]:
    """Resolves the draft's input as ``latest`` does, except for one field, which comes from another row."""

    def misplaced(context: Any, prompts: Any, batch: Any) -> None:
        drafts.resolve_on_the_forward_stream(context, prompts, batch)
        if batch.spec_info is not None and batch.batch_size > 1:
            state = batch.spec_info.state
            moved = state._replace(**{field: getattr(state, field).roll(1, 0)})
            batch.spec_info = replace(batch.spec_info, state=moved)

    return misplaced


@pytest.mark.wide
@pytest.mark.parametrize("field", ["hidden_states", "topk_index"])
def test_the_draft_state_of_another_request_is_reported_by_field(field: str) -> None:
    wrong = broken(question(), lambda row: replace(row, resolve=of_a_neighbour(field)))
    found = violations(wrong)
    assert found.keys() == {field}
    assert f"its draft starts from {field} that its last extend did not leave" in found[field]
    assert checked(wrong).verdict == "failed"


def test_a_wrong_draft_extend_is_found_by_the_draft_check_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The relay is right, and so are all orders and tokens, so no other check can find it."""
    extend = Drafter.extend_chains

    def shifted(self: Drafter, chains: VerifiedChains) -> DraftState:
        return extend(self, chains._replace(hidden_states=chains.hidden_states.roll(1, 0)))

    monkeypatch.setattr(Drafter, "extend_chains", shifted)
    wrongly_extended = question("workload.requests=2")
    [failed] = Examiner(wrongly_extended, (0,)).examine(wrongly_extended.relays[0]).failed
    says = failed.evidence[0].says
    assert failed.name == NAME
    assert says.startswith("request r0, verify 1, length ")
    assert "its draft starts from other " in says and "hidden_states" in says
