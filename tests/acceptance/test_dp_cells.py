"""What an idle step copies, launches and waits for, in every state; and what the result of data-parallel ranks says."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path

import pytest

from schedbench.profiles.record.result import Metric, RankPart, Result
from schedbench.sched.batch import ScheduleBatch
from schedbench.sched.data_parallel.sync import RankStatus
from schedbench.sched.loop.workers import DataRank
from schedbench.sched.relay.choice import choose
from tests.acceptance.runs import each_state, hazards_in, known_result, resolved, result_of
from tests.conftest import RunCommand
from tests.scenarios.refusals import refused

IDLING = "faults/idling"
EAGER = "engine.cuda_graph=false"
NONE = "device.values=none"
SHARED = (EAGER, "engine.data_parallel.mlp=shared")
LAYERS = 2
SOME = ("pr25774-before", "pr25945", "latest")


run = partial(known_result, IDLING)


def idle(result: Result) -> dict[str, dict[str, set[float]]]:
    """Counters of idle steps, on both ranks: one number where every step has the same."""
    found: dict[str, dict[str, set[float]]] = {}
    for rank in result.ranks:
        for stream, tallies in rank.per_step["idle"].streams.items():
            for name, tally in tallies.items():
                found.setdefault(stream, {}).setdefault(name, set()).update({tally.median, tally.max})
    return found


def steps(rank: RankPart) -> dict[str, int]:
    return {kind: counts.steps for kind, counts in rank.per_step.items() if kind != "decode.steady"}


@pytest.mark.parametrize("state", each_state(*SOME))
def test_an_idle_step_does_no_work(state: str) -> None:
    """Nothing is uploaded, launched or stashed; the overlapped loop waits for the event of its empty result."""
    assert idle(run(f"engine.relay={state}", EAGER, NONE)) == {"forward": {"sync": {1}}}


@pytest.mark.parametrize("state", SOME)
def test_an_idle_step_of_the_serial_loop_does_not_wait(state: str) -> None:
    assert idle(run(f"engine.relay={state}", EAGER, NONE, "engine.overlap=false")) == {}


def test_an_idle_rank_replays_the_graph_of_the_others() -> None:
    """It launches as many kernels as a decode, except those for input and sampling, and none while another rank
    prefills."""
    counts = run().ranks[0].per_step["idle"].streams["forward"]["kernel"]
    assert 0 < counts.steps_with < run().ranks[0].per_step["idle"].steps
    decoded = run().ranks[1].per_step["decode.steady"].streams["forward"]["kernel"]
    assert counts.max > 9 * LAYERS and counts.max < decoded.max


@pytest.mark.parametrize("state", SOME)
def test_an_idle_rank_computes_its_part_of_a_shared_mlp(state: str) -> None:
    """Per layer: gathering rows and columns, two products, one activation. Only its columns are sent."""
    counts = idle(run(f"engine.relay={state}", *SHARED))
    assert counts["forward"] == {"kernel": {5 * LAYERS}, "sync": {1}}
    assert counts["link"] == {"send": {2 * LAYERS}}
    assert counts.keys() == {"forward", "link"}


def test_all_ranks_make_as_many_steps() -> None:
    for knobs in ((), (f"engine.relay={SOME[0]}", *SHARED), ("engine.data_parallel.ranks=3", NONE)):
        counts = [sum(steps(rank).values()) for rank in run(*knobs).ranks]
        assert len(set(counts)) == 1 and counts[0] > 10


@pytest.mark.parametrize(
    "launches", [pytest.param((), marks=pytest.mark.wide), SHARED], ids=["graphs", "shared"]
)
@pytest.mark.parametrize("state", each_state("pr25774", "pr25945"))
def test_a_state_shows_the_hazards_that_it_declares(state: str, launches: tuple[str, ...]) -> None:
    """Each declared hazard appears on some rank, and no other hazard on any."""
    crowd = (
        "workload.requests=12",
        "workload.arrival=burst",
        "workload.output_tokens={dist: uniform, min: 4, max: 40}",
    )
    found = hazards_in(result_of(IDLING, *crowd, f"engine.relay={state}", *launches, hazards=True))
    assert not found.findings
    assert found.known == choose(state, {}).known_hazards()


def test_the_result_has_the_metrics_of_every_rank() -> None:
    result = run()
    assert [(rank.name, rank.role) for rank in result.ranks] == [("rank 0", "data"), ("rank 1", "data")]
    assert [row.id for row in result.requests] == [f"r{k}" for k in range(6)]
    for rank in result.ranks:
        share = rank.metrics["idle_step_share"]
        assert isinstance(share, Metric)
        assert share.values == (steps(rank)["idle"] / sum(steps(rank).values()),)


def test_every_rank_has_a_column_and_a_picture(run_command: RunCommand, tmp_path: Path) -> None:
    said = run_command("run", IDLING, "--output-dir", tmp_path)
    assert said.code == 0
    [row] = [line.split() for line in said.out.splitlines() if line.startswith("idle step share")]
    assert len(row) == 6 and all(float(cell) > 0 for cell in row[4:])
    assert run_command("trace", tmp_path).code == 0
    events = json.loads(gzip.decompress((tmp_path / "perfetto.json.gz").read_bytes()))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {f"rank {rank}, emulated h200: host" for rank in (0, 1)} <= names


def test_ranks_without_requests_do_not_spin() -> None:
    """During a long pause all ranks sleep until the next arrival."""
    pause = ("workload.arrival={process: constant, rate: 1}", "workload.requests=3")
    result = run(*pause)
    slept = result.ranks[0].metrics["host_stall_us_per_step"]
    assert isinstance(slept, Metric) and slept.values[0] < 2_000
    rounds = sum(row.count for row in result.syncs if row.site and row.site.function.startswith("exchange"))
    assert 0 < rounds < 4 * sum(sum(steps(rank).values()) for rank in result.ranks)


def test_reads_during_the_exchange_count_in_the_planned_step(monkeypatch: pytest.MonkeyPatch) -> None:
    status = DataRank._status

    def reading(rank: DataRank, batch: ScheduleBatch | None) -> RankStatus:
        if batch is not None and batch.forward_mode.is_decode:
            batch.seq_lens.sum().item()
        return status(rank, batch)

    monkeypatch.setattr(DataRank, "_status", reading)
    for rank in result_of(IDLING, NONE).ranks:
        reads = rank.per_step["decode"].streams["schedule"]["d2h_blocking"]
        assert (reads.mean, reads.max) == (1, 1)
        assert "schedule" not in rank.per_step["idle"].streams


def test_a_shared_mlp_has_no_more_ranks_than_columns() -> None:
    [problem] = refused(resolved, IDLING, *SHARED, "engine.data_parallel.ranks=9")
    assert "expected at most 8, which share the columns of tiny-llama, got 9" in problem
