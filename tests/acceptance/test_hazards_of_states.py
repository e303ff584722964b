"""Whole runs under the hazard checker: each state shows the hazards that it declares, and deliberate faults are
found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from cProfile import Profile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from schedbench.profiles.record.result import Hazards, Result
from schedbench.profiles.run.declared_hazards import SIGNS
from schedbench.sched.batch import FutureIndices, ScheduleBatch
from schedbench.sched.relay import ordering, tokens
from schedbench.sched.relay.choice import RelayChoice, choose
from schedbench.sched.relay.context import RelayContext
from schedbench.sched.relay.names import SWITCH_VALUES
from schedbench.sched.relay.row import Step
from schedbench.sched.relay.states import (
    DEAD_PUBLISH,
    PAGE_TABLE_REWRITE,
    PENALTY_STATE,
    SLOT_REUSE,
    STAGED_LATE,
    states,
)
from tests.acceptance.runs import SMALL, executed, hazards_in, resolved
from tests.conftest import RunCommand

# Some requests end while others decode, and prompts are computed beside both.
NONE = "device.values=none"
CROWD = (*SMALL, "workload.requests=10", "workload.output_tokens={dist: uniform, min: 8, max: 20}", NONE)
LATEST = "engine.relay=latest"
FIFTY = (
    "workload.requests=50",
    "workload.prompt_tokens={dist: fixed, value: 64}",
    "workload.arrival.concurrency=50",
    "engine.max_running_requests=50",
    "measure.warmup_requests=0",
)


def watched(scenario: str, *overrides: str, hazards: bool = True) -> Result:
    return executed(resolved(scenario, *overrides), hazards=hazards)


@pytest.mark.parametrize(
    "overrides",
    [
        *(
            ("mixed", *CROWD, *settings)
            for settings in (
                ("device.values=real",),
                ("engine.page_size=16",),
                ("engine.mixed_chunk=false",),
                ("engine.radix_cache=false", "engine.chunked_prefill_size=64"),
                ("engine.cuda_graph=false",),
                ("engine.overlap=false",),
                ("engine.kv_tokens=600", "engine.schedule_conservativeness=0.05"),
            )
        ),
        *((name, "workload.requests=4") for name in ("penalties", "grammar", "retraction", "shared_prefix")),
    ],
    ids=lambda overrides: " ".join((overrides[0], *overrides[-2:])),
)
def test_latest_shows_no_hazard(overrides: tuple[str, ...]) -> None:
    result = watched(*overrides, LATEST)
    assert hazards_in(result) == Hazards() and not result.undeclared


@pytest.mark.parametrize(
    ("relay", "known"),
    [
        ("pr25945", (PAGE_TABLE_REWRITE, DEAD_PUBLISH)),
        # without the barrier
        ("pr25774-before", (SLOT_REUSE, PAGE_TABLE_REWRITE)),
        ("pr25774", (SLOT_REUSE, PAGE_TABLE_REWRITE)),
        ("pr25944-before", (SLOT_REUSE, PAGE_TABLE_REWRITE)),
        ("pr25944", (SLOT_REUSE, PAGE_TABLE_REWRITE)),  # a decode's lengths come from what was published
        ("pr26020", (SLOT_REUSE, PAGE_TABLE_REWRITE, DEAD_PUBLISH)),
        ("pr26425", (SLOT_REUSE, PAGE_TABLE_REWRITE, DEAD_PUBLISH)),
        # with fused preparation
        ("{state: latest, barrier: off}", (SLOT_REUSE, PAGE_TABLE_REWRITE)),
        ("{state: pr26425, preparation: fused}", (SLOT_REUSE, PAGE_TABLE_REWRITE, DEAD_PUBLISH)),
    ],
)
def test_a_state_shows_exactly_its_declared_hazards(relay: str, known: tuple[str, ...]) -> None:
    result = watched("mixed", *CROWD, f"engine.relay={relay}")
    assert hazards_in(result).known == known and not result.undeclared


@pytest.mark.parametrize("values", ["real", "none"])
def test_a_dead_publish_is_found_with_its_line(values: str) -> None:
    publishing = broken("latest", publish=tokens.publish_next_lengths)
    [finding] = run_with(publishing, f"device.values={values}").findings
    assert (finding.resource, finding.second) == ("new_seq_lens_buf", None)
    assert finding.first.site and finding.first.site.statement.startswith("self.new_seq_lens_buf[rows] =")
    assert finding.missing.endswith(" writes, is never read")


@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("state", ["pr25774", "pr25944", "pr25945", "latest"])
def test_tokens_without_a_later_decode_are_no_finding(state: str, overlap: str) -> None:
    """Every request ends with its prompt."""
    prompts_only = (
        "workload.output_tokens.min=1",
        "workload.output_tokens.max=1",
        f"engine.overlap={overlap}",
    )
    assert not watched("mixed", *CROWD, *prompts_only, f"engine.relay={state}").undeclared


@pytest.mark.parametrize("state", ["pr25945", "latest"])
def test_penalties_race_with_their_count_without_a_barrier(state: str) -> None:
    relay = f"engine.relay={{state: {state}, barrier: off, penalties: upstream}}"
    result = watched("penalties", relay, "workload.requests=8")
    assert PENALTY_STATE in hazards_in(result).known and not result.undeclared


@pytest.mark.parametrize(
    ("state", "barrier"),
    [
        ("pr26425", "off"),
        pytest.param("pr25945", "top", marks=pytest.mark.wide),
        pytest.param("pr25945", "off", marks=pytest.mark.wide),
        ("latest", "off"),
        ("latest", "read-done"),
    ],
)
def test_a_state_shows_exactly_its_declared_hazards_under_speculation(state: str, barrier: str) -> None:
    relay = f"{{state: {state}, barrier: {barrier}}}"
    eagle = ("model.preset=tiny-llama-eagle", "engine.mixed_chunk=false")
    speculation = "engine.speculative={algorithm: eagle, mode: v2}"
    overrides = (*eagle, speculation, f"engine.relay={relay}", "engine.overlap=true", "workload.requests=7")
    shown: set[str] = set()
    for sampling in ("{temperature: 0.0}", "{frequency_penalty: 0.5}"):
        # With exact penalties the schedule stream waits for the forward whenever rows change.
        result = watched("faults/mixing", *overrides, f"workload.sampling={sampling}")
        assert not result.undeclared, hazards_in(result)
        shown |= set(hazards_in(result).known)
    assert shown == set(choose(state, {"barrier": barrier}).known_hazards(speculation="v2"))


def test_every_declared_hazard_has_a_sign() -> None:
    barriers = SWITCH_VALUES["barrier"]
    declared = {
        name
        for state in states()
        for barrier in barriers
        for mode in (None, "v2")
        for name in choose(state, {"barrier": barrier}).known_hazards(speculation=mode)
    }
    for mode in ({"staged": True}, {"split": True}):
        declared |= {name for state in states() for name in choose(state, {}).known_hazards(**mode)}
    assert declared == set(SIGNS)


def test_without_the_barrier_rows_are_reused_while_a_forward_reads_them() -> None:
    """Also in ``latest`` with nothing declared."""
    off = choose("latest", {"barrier": "off"})
    findings = run_with(
        RelayChoice(replace(off.state, overlapped=off.row(overlap=True)), off.state.defaults)
    ).findings
    assert "req_to_token" in {finding.resource for finding in findings}
    assert {finding.first.stream for finding in findings} == {"forward"}


# ---- deliberate faults, besides those of sched/relay/faults.py, which test_faults_show.py has --------------------


def broken(state: str = "pr25945", /, **policies: Any) -> RelayChoice:
    """Returns a state with some policies exchanged."""
    whole = states()[state]
    return RelayChoice(replace(whole, overlapped=replace(whole.overlapped, **policies)), whole.defaults)


def run_with(choice: RelayChoice, *overrides: str) -> Hazards:
    return hazards_in(executed(resolved("mixed", *CROWD, *overrides).with_relay(choice), hazards=True))


@contextmanager
def isolate_without_wait(
    context: RelayContext, resolve: Step, read_tables: Step, batch: ScheduleBatch
) -> Iterator[None]:
    """The forward stream starts although the schedule stream's writes may be unfinished."""
    with (
        context.streams.on(context.streams.forward),
        ordering.resolve_in_place(context, resolve, read_tables, batch),
    ):
        kept = batch.sampling_info
        assert kept is not None
        batch.sampling_info = kept.copy_for_forward()
        yield
        batch.sampling_info = kept


def test_a_forward_that_does_not_wait_for_the_schedule_is_found() -> None:
    findings = run_with(broken(isolate=isolate_without_wait)).findings
    read_early = {
        f.second.op for f in findings if (f.first.stream, f.second.stream) == ("schedule", "forward")
    }
    assert {"attention", "decode_positions"} <= read_early


def test_tokens_stashed_on_the_wrong_stream_are_no_slot_reuse() -> None:
    """Slot reuse is declared without the barrier, and must not cover this hazard."""

    def on_the_schedule(context: RelayContext, future: FutureIndices, token_ids: torch.Tensor) -> None:
        with context.streams.on(context.streams.schedule):
            tokens.stash_by_row(context, future, token_ids)

    off = choose("pr25945", {"barrier": "off"})
    row = replace(off.row(overlap=True), stash=on_the_schedule)
    misplaced = RelayChoice(replace(off.state, overlapped=row), off.switches)
    assert SLOT_REUSE in misplaced.known_hazards()
    findings = run_with(misplaced).findings
    assert "output_tokens_buf" in {finding.resource for finding in findings}


def test_a_pipeline_stage_frees_indices_that_a_gather_still_reads() -> None:
    """A pipeline's loop keeps no references; the overlapped loop's ring keeps the indices for two launches."""
    staged = watched("faults/staging", "engine.relay=pr25945")
    assert STAGED_LATE in hazards_in(staged).known and not staged.undeclared
    assert STAGED_LATE not in choose("pr25945", {}).known_hazards()


# ---- the command -------------------------------------------------------------------------------------------


def test_declared_hazards_are_listed_by_name(run_command: RunCommand, tmp_path: Path) -> None:
    sets = [part for override in CROWD for part in ("--set", override)]
    said = run_command("run", "mixed", *sets, "--hazards", "on", "--output-dir", tmp_path)
    assert said.code == 0 and "page-table rewrite" in said.out
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["hazards"] == {"known": [PAGE_TABLE_REWRITE, DEAD_PUBLISH], "findings": []}
    assert document["run"]["hazards_s"] > 0


def test_hazards_off_abstains(run_command: RunCommand) -> None:
    sets = [part for override in CROWD for part in ("--set", override)]
    said = run_command("run", "mixed", *sets, "--hazards", "off", "--format", "json")
    document = json.loads(said.out)
    assert said.code == 0 and "abstained" in document["hazards"] and document["run"]["hazards_s"] is None


def test_hazard_checking_changes_nothing_else() -> None:
    plain, seen = (watched("mixed", *CROWD, hazards=hazards).document() for hazards in (False, True))
    for part in ("run", "environment", "hazards"):
        del plain[part], seen[part]
    assert seen.pop("ordering")  # watched for together with hazards
    assert plain == seen


@pytest.mark.wide
def test_hazard_checking_adds_few_calls_to_a_steady_step() -> None:
    """Calls are counted, since processor times vary with other load of the machine; ``schedbench bench`` has those. The
    number that is added does not depend on the cost of a step without hazards, which has a bound of its own."""
    checked, plain = steady_calls(hazards=True), steady_calls(hazards=False)
    assert 0 < checked - plain < 2600
    assert plain < 1400


def steady_calls(*, hazards: bool) -> float:
    """Returns the number of function calls of a decode. The first run, which also loads modules, does not count."""
    _, short, long = (calls(tokens, hazards=hazards) for tokens in (20, 20, 60))
    return (long - short) / 40


def calls(tokens: int, *, hazards: bool) -> int:
    """Returns the number of function calls of a run in which 50 requests decode that many tokens together."""
    length = f"workload.output_tokens={{dist: fixed, value: {tokens}}}"
    question = resolved("overlap_on", *FIFTY, length, LATEST, NONE)
    with Profile() as profile:
        executed(question, hazards=hazards)
    return sum(entry.callcount for entry in profile.getstats())
