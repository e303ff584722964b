"""A pipeline's tokens are one scheduler's, in every state, mode and world."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path

import pytest

from schedbench.cli.result_page import page
from schedbench.profiles.check.faults import fault_scenario
from schedbench.profiles.record.result import Hazards
from schedbench.sched.relay.faults import faults
from tests.acceptance.runs import (
    digest,
    digest_of,
    each_state,
    executed,
    known_digest,
    resolved,
    result_of,
    statuses,
    value,
)
from tests.cli.pages import printed
from tests.conftest import RunCommand

SMALL = (
    "model.preset=tiny-deep",
    "workload.requests=8",
    "workload.prompt_tokens={dist: uniform, min: 4, max: 70}",
    "workload.output_tokens={dist: uniform, min: 2, max: 8}",
    "engine.overlap=auto",
    "engine.chunked_prefill_size=32",
    "measure.warmup_requests=0",
)
TWO, FOUR = "engine.pipeline.stages=2", "engine.pipeline.stages=4"
NONE = ("device.values=none",)
TIGHT = ("engine.kv_tokens=192", "engine.schedule_conservativeness=0.01", "engine.radix_cache=false")


alone = partial(known_digest, "mixed", *SMALL)


@pytest.mark.wide
@pytest.mark.parametrize(
    "knobs",
    [
        (TWO,),
        (FOUR,),
        (TWO, "engine.mixed_chunk=false"),
        (TWO, "engine.chunked_prefill_size=none", "engine.mixed_chunk=false"),
        (TWO, "engine.pipeline.async_depth=2"),
        (TWO, "engine.mixed_chunk=false", "engine.pipeline.skip_chunk_outputs=true"),
        (TWO, "engine.cuda_graph=false"),
        (TWO, "engine.page_size=16"),
        (TWO, "engine.radix_cache=false", "engine.page_size=16"),
        (TWO, "engine.max_running_requests=2"),
        (TWO, "workload.arrival={process: closed, concurrency: 3}"),
    ],
    ids=" ".join,
)
def test_no_knob_changes_a_token(knobs: tuple[str, ...]) -> None:
    assert digest("mixed", *SMALL, *knobs, *NONE) == alone(*NONE)


@pytest.mark.parametrize("stages", [TWO, pytest.param(FOUR, marks=pytest.mark.wide)])
def test_no_number_of_stages_changes_a_token_with_real_values(stages: str) -> None:
    assert digest("mixed", *SMALL, stages) == alone()


@pytest.mark.parametrize("values", [NONE, pytest.param((), marks=pytest.mark.wide)], ids=["none", "real"])
@pytest.mark.parametrize("state", each_state("pr25774-before", "pr25944", "pr25945", "latest"))
def test_a_state_has_the_tokens_of_one_rank(state: str, values: tuple[str, ...]) -> None:
    """Soonest are states with each way to publish lengths and to hand on tokens."""
    assert digest("mixed", *SMALL, TWO, f"engine.relay={state}", *values) == alone(*values)


@pytest.mark.parametrize(
    "sampling",
    [
        "{temperature: 0.8, top_p: 0.9, presence_penalty: 0.4, logprobs: true}",
        "{temperature: 0.7, grammar: {regex: '[0-9]{1,9}'}}",
    ],
)
def test_sampling_gives_the_tokens_of_one_rank(sampling: str) -> None:
    """Upstream's penalties, counted from the input, are those of the serial loop in both runs."""
    knobs = (f"workload.sampling={sampling}", "workload.requests=5")
    assert digest("mixed", *SMALL, TWO, *knobs) == alone("engine.overlap=false", *knobs)


@pytest.mark.parametrize("stages", [TWO, pytest.param(FOUR, marks=pytest.mark.wide)])
def test_retraction_changes_no_token(stages: str) -> None:
    growing = (
        "workload.arrival=burst",
        "workload.shared_prefix={groups: 8, tokens: 1}",
        "workload.prompt_tokens.max=40",
        "workload.output_tokens={dist: uniform, min: 20, max: 60}",
        *NONE,
    )
    result = result_of("mixed", *SMALL, *TIGHT, *growing, stages)
    assert value(result, "retractions") > 0 and statuses(result) == {"finished"}
    assert digest_of(result) == alone(*growing)


@pytest.mark.wide
def test_shipped_pipelines_finish_every_request() -> None:
    for name in ("pp2", "pp4_mixed"):
        found = result_of(name, "workload.requests=4", "workload.output_tokens.max=24")
        assert statuses(found) == {"finished"} and found.hazards == Hazards()
        assert found.labels.world == "virtual" and not found.unrecorded
        assert [rank.name for rank in found.ranks] == [f"stage {k}" for k in range(len(found.ranks))]


def test_ids_that_are_sent_for_tags_show_no_hazard() -> None:
    """They are made by the schedule stream, which does not wait for a chunk whose token is not sent."""
    knobs = ("engine.chunked_prefill_size=64", "engine.pipeline.skip_chunk_outputs=true", *NONE)
    found = executed(resolved("pp2", "workload.requests=6", *knobs), hazards=True)
    assert found.hazards == Hazards()


@pytest.mark.wide
@pytest.mark.parametrize("stages", [2, 4])
def test_processes_give_the_same_tokens_and_counts(stages: int) -> None:
    """The same ranks run as processes over gloo."""
    question = resolved("mixed", *SMALL, f"engine.pipeline.stages={stages}", "workload.arrival=burst")
    together, apart = (executed(question, world=world, hazards=True) for world in ("virtual", "distributed"))
    assert digest_of(apart) == digest_of(together) == alone("workload.arrival=burst")
    assert len(apart.ranks) == stages and statuses(apart) == {"finished"}
    assert apart.labels.world == "distributed" and apart.unrecorded
    assert isinstance(apart.hazards, Hazards) and not apart.hazards.findings
    assert apart.per_step == together.per_step
    assert [rank.per_step for rank in apart.ranks] == [rank.per_step for rank in together.ranks]


@pytest.mark.wide
def test_processes_show_the_hazards_of_virtual_time() -> None:
    """A message carries its sender's clock, because only messages order the streams of different stages."""
    question = fault_scenario(faults()["stage-tokens-unawaited"]).question()
    results = [executed(question, world=world, hazards=True) for world in ("virtual", "distributed")]
    assert isinstance(results[0].hazards, Hazards) and results[0].hazards.findings
    assert set(results[1].hazards.findings) == set(results[0].hazards.findings)
    assert "\nundeclared hazards\n" in printed(page(results[1].document(), 100))


def test_ranks_are_drawn_on_one_clock(run_command: RunCommand, tmp_path: Path) -> None:
    """One trace has the tracks of every stage; a stage receives proxies after the previous stage has sent them."""
    small = ("--set", "workload.requests=2", "--set", "workload.output_tokens=6")
    assert run_command("run", "pp4_mixed", *small, "--output-dir", tmp_path).code == 0
    assert run_command("trace", tmp_path).code == 0
    events = json.loads(gzip.decompress((tmp_path / "perfetto.json.gz").read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    drawn = [(names[e["pid"]], e) for e in events if e["ph"] == "X"]
    assert [names[pid] for pid in (1, 5, 9, 13)] == [f"stage {k}, emulated h200: host" for k in range(4)]
    sent = [
        e["ts"] + e["dur"]
        for name, e in drawn
        if name == "stage 0, emulated h200: streams" and e["cat"] == "send"
    ]
    forwards = [
        e["ts"]
        for name, e in drawn
        if name == "stage 1, emulated h200: streams" and e["args"].get("range") == "model"
    ]
    assert min(forwards) >= min(sent) > 0
