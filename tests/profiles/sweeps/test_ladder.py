"""A ladder's document, its claim about tokens, and the break-even of prompt lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from schedbench.cli.run import exit_code
from schedbench.profiles.platform.inputs import scenario_part
from schedbench.profiles.platform.resolve import Resolved, ask
from schedbench.profiles.ranks.execute import Options
from schedbench.profiles.record.result import Result
from schedbench.profiles.sweeps.break_even import crossings
from schedbench.profiles.sweeps.ladder import climb, document, tokens_agree
from schedbench.profiles.sweeps.runs import Runs
from schedbench.profiles.sweeps.sweep import SweepPlan, cells, planned

SMALL = (
    "workload.requests=6",
    "workload.arrival=burst",
    "workload.prompt_tokens.max=60",
    "workload.output_tokens.max=12",
    "measure.warmup_requests=0",
)
VGPU = Options(device="vgpu")


RELAYS = "engine.relays=[pr25944, pr26020, {state: latest, barrier: top}]"


def small(*overrides: str) -> Resolved:
    return ask("mixed", [*SMALL, *overrides])


@pytest.fixture(scope="module")
def rungs() -> list[Result]:
    return climb(small(RELAYS), VGPU)


def test_a_rung_for_each_relay_in_order(rungs: list[Result]) -> None:
    assert [rung.relay.state for rung in rungs] == ["pr25944", "pr26020", "latest"]
    assert tokens_agree(small(RELAYS), rungs)


def test_the_document_holds_a_result_for_each(rungs: list[Result]) -> None:
    question = small(RELAYS)
    found = json.loads(json.dumps(document(question, scenario_part(question), rungs)))
    first, second, third = found["rungs"]
    assert first["changes"] == {}
    assert second["changes"]["advance"] == ["advance_host_side", "advance_new_tensor"]
    assert third["result"]["relay"]["switches"]["barrier"] == "top"
    assert third["result"]["relay"]["policies"]["preparation"] == "fused"
    for rung in found["rungs"]:
        assert Result.from_json(json.dumps(rung["result"])).outputs
    assert found["ladder"] == {"tokens_agree": True}


def test_an_interruption_in_other_processes_keeps_the_rungs_before_it(
    rungs: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def each(*_: object) -> Iterator[Result]:
        yield rungs[1]
        raise KeyboardInterrupt

    monkeypatch.setattr("schedbench.profiles.sweeps.ladder.spread", lambda *_: nullcontext(each))
    question = small(RELAYS)
    found = climb(question, VGPU)
    said = document(question, scenario_part(question), found)["conclusion"]
    assert said == "interrupted after 2 relays, no conclusion." and exit_code(found[-1]) == 130


def test_a_relay_with_other_tokens_is_named(rungs: list[Result]) -> None:
    other = climb(small("engine.relay=latest", "model.seed=1"), VGPU)
    assert not tokens_agree(small(RELAYS), rungs + other)


@pytest.mark.wide
def test_upstream_and_exact_penalties_may_have_other_tokens() -> None:
    relays = "engine.relays=[pr25774-before, pr25945, latest, {state: pr25944, penalties: exact}]"
    question = ask("penalties", ["workload.requests=12", relays])
    found = climb(question, VGPU)
    outputs = [rung.outputs for rung in found]
    assert outputs[0] == outputs[1] != outputs[2] == outputs[3]
    assert tokens_agree(question, found)


@pytest.mark.wide
class TestPromptLengths:
    """#25945 left open when moving the prompt's copy pays. Without the barrier the copy used to run beside the previous
    forward: the cost of the removed kernel is gained, and lost again to the copy's own time at long prompts. With the
    barrier the copy waited for the previous forward anyway."""

    def test_without_the_barrier_there_is_a_crossing(self) -> None:
        short, long = added_us("off", 2048, 32768)
        assert short < -1
        assert long > 1

    def test_the_sweep_reports_the_crossing(self) -> None:
        plan = swept("off", 24000, 28000)
        (crossing,) = crossings(plan, list(cells(plan, Runs(VGPU))))
        assert (crossing.low, crossing.high, crossing.tone) == ("24000", "28000", "worse")

    def test_with_the_barrier_there_is_none(self) -> None:
        short, long = added_us("top", 128, 8192)
        assert long < short < 0

    def test_the_difference_is_some_microseconds(self) -> None:
        assert all(abs(us) < 10 for barrier in ("off", "top") for us in added_us(barrier, 8192))


def swept(barrier: str, *lengths: int) -> SweepPlan:
    """Runs the sweep of docs/ladder.md."""
    sides = [
        f"engine.relay={{state: {state}, barrier: {barrier}}}" for state in ("pr25945-before", "pr25945")
    ]
    over = f"workload.prompt_tokens={','.join(map(str, lengths))}"
    return planned("prompt_staging", [over], sides=sides, metric="output_throughput")


def added_us(barrier: str, *lengths: int) -> list[float]:
    """Microseconds per prefill that the move adds: a prefill gives one token, one after the other."""
    found = cells(swept(barrier, *lengths), Runs(VGPU))
    return [1e6 / cell.values[1].value - 1e6 / cell.values[0].value for cell in found]
