"""What lines and host phases are worth: counterfactual runs of an 8B shape, without values."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from schedbench.profiles.judge.local import without_values
from schedbench.profiles.platform.resolve import Resolved, ask
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import STREAM_WAIT, Result, WorthRow
from schedbench.profiles.worth.candidates import LineSurvey, SourceLine, phases, source_lines
from schedbench.profiles.worth.worth import TOO_EARLY, Figures, Gains, figures, room, tried, worth

UPLOAD = "sched/relay/penalties.py"
SHORT = ("workload.prompt_tokens=512", "workload.output_tokens=24")


class BaseRun:
    """A run and the changes that can be made to it."""

    def __init__(self, name: str, *overrides: str) -> None:
        self.question: Resolved = ask(name, overrides)
        surveys = [LineSurvey() for _ in range(self.question.scenario.engine.ranks)]
        self.result: Result = execute(self.question, Options(device="vgpu"), extra_sinks=surveys)
        self.figures: Figures = figures(self.result, surveys)
        self.lines = source_lines(self.result, surveys)
        self.phases = phases(surveys, self.question.hardware)

    def line(self, file: str) -> SourceLine:
        return next(line for line in self.lines if line.site.file == file)

    def gains(self) -> Gains:
        return Gains(self.question, self.figures, lambda _: None)


@pytest.fixture(scope="module")
def penalised() -> BaseRun:
    """One client with penalties; pr25945 uploads its last token in every decode by a blocking copy."""
    return BaseRun("cases/h2d-blocking-output-ids", "engine.relay=pr25945", *SHORT)


def test_the_launches_of_all_ranks_are_asked() -> None:
    """Where decodes place their tokens, which the first rank, a prefill worker, never does."""
    base = BaseRun("disagg", "workload.requests=2", "measure.warmup_requests=0")
    placed = [line for line in base.lines if line.site.function == "split_tokens"]
    assert [line.kinds for line in placed if "launch" in line.what] == [{"decode"}]


def rows(gains: Gains) -> dict[str, WorthRow]:
    return {row.change: row for row in gains.part().rows}


def test_a_wait_is_worth_far_more_than_its_exposed_part(penalised: BaseRun) -> None:
    """The wait also keeps the host's later work from overlapping the forward."""
    upload = penalised.line(UPLOAD)
    steps = penalised.result.per_step["decode"].steps
    assert 5 < upload.exposed_us / steps < 9

    gains = penalised.gains()
    gains.ask([(upload, change) for change in ("absent", "no wait", "pinned")], map)
    found = rows(gains)
    for row in found.values():
        assert row.tpot_ms is not None and -0.110 < row.tpot_ms < -0.090
        assert row.step_us is not None and -110 < row.step_us < -85
        assert not row.hidden and not row.abstained
    assert gains.part().rows[0].change == "absent"


def test_the_worth_of_a_line_equals_the_gain_of_the_real_change(penalised: BaseRun) -> None:
    """Counting penalties on the device removes the upload, at the cost of one launch."""
    gains = penalised.gains()
    gains.ask([(penalised.line(UPLOAD), "absent")], map)
    [row] = gains.part().rows
    fixed = BaseRun(
        "cases/h2d-blocking-output-ids", "engine.relay={state: pr25945, penalties: exact}", *SHORT
    )
    assert row.tpot_ms == pytest.approx(
        (fixed.figures.tpot_ms or 0) - (penalised.figures.tpot_ms or 0), rel=0.1
    )


def test_the_worth_of_a_stream_wait_equals_the_gain_without_the_barrier() -> None:
    with_barrier, without = (
        BaseRun("cases/bidirectional-wait", f"engine.relay.barrier={barrier}", *SHORT)
        for barrier in ("top", "off")
    )
    line = next(line for line in with_barrier.lines if STREAM_WAIT in line.what)
    gains = with_barrier.gains()
    gains.ask([(line, "absent")], map)
    [row] = gains.part().rows
    gain = (without.figures.output_throughput or 0) / (with_barrier.figures.output_throughput or 1) - 1
    assert gain > 0.02
    assert row.output_throughput_pct == pytest.approx(100 * gain, rel=0.05)


def test_the_lines_that_cost_most_come_first(penalised: BaseRun) -> None:
    assert penalised.lines[0].site.file == UPLOAD
    assert penalised.lines[0].what == {"h2d pageable blocking": None, "cudaStreamSynchronize": None}
    assert any("launch" in line.what for line in penalised.lines)
    assert {"prepare", "settle", "model"} <= {*penalised.phases}


def test_a_phase_gains_no_more_than_half_of_its_time(penalised: BaseRun) -> None:
    gains = penalised.gains()
    gains.ask([("model", "half")], map)
    [row] = gains.part().rows
    half = penalised.question.hardware.phases["model"].a.value / 2e3
    assert row.phase == "model" and row.step_us == pytest.approx(-half, rel=0.05)


def test_the_room_of_a_hidden_line_ends_where_a_figure_loses(penalised: BaseRun) -> None:
    place = "admit"
    gains = penalised.gains()
    gains.ask([(place, "half")], map)
    gains.search([place], map)
    [row] = gains.part().rows
    assert row.hidden and row.room_us is not None
    low, high = row.room_us
    assert high == 2 * low
    base = penalised.figures
    shown = [tried(penalised.question, (place, "longer"), round(1e3 * us)) for us in (low, high)]
    assert [found.is_beaten_by(base) for found in shown] == [False, True]


def test_a_line_that_never_runs_has_unlimited_room(penalised: BaseRun) -> None:
    assert "draft" not in penalised.phases
    assert room(penalised.question, penalised.figures, "draft")[1] is None


def test_a_change_of_tokens_has_no_figures(penalised: BaseRun) -> None:
    gains = Gains(penalised.question, penalised.figures._replace(digest="another"), lambda _: None)
    gains.ask([(penalised.line(UPLOAD), "absent")], map)
    [row] = gains.part().rows
    assert (
        row.abstained.startswith("tokens would be others")
        and row.output_throughput_pct is None
        and not row.hidden
    )


@pytest.mark.parametrize(
    "overrides", [(), ("engine.overlap=false",), ("engine.pipeline.stages=2", "engine.overlap=false")]
)
def test_a_wait_for_tokens_has_no_figures(overrides: tuple[str, ...]) -> None:
    """Without the wait the host would deliver tokens before the device has computed them."""
    run = BaseRun("overlap_on", "workload.requests=2", "workload.output_tokens=12", *overrides)
    gains = run.gains()
    gains.ask([(line, "absent") for line in run.lines if line.waits and "decode" in line.kinds], map)
    assert not any("receive" in " ".join(line.what) for line in run.lines)  # waits for other ranks' hosts
    void = [row for row in gains.part().rows if row.abstained]
    assert void and all(row.abstained == TOO_EARLY and row.output_throughput_pct is None for row in void)


def test_an_interrupted_search_keeps_what_it_has(penalised: BaseRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedbench.profiles.worth.worth.spread", lambda *_: nullcontext(map))

    def interrupt(text: str) -> None:
        if text.startswith("counterfactual runs: 2 of "):
            raise KeyboardInterrupt

    found = worth(penalised.question, penalised.result, interrupt, rooms=1)
    part = found.worth
    assert found.run.further_cancelled and part is not None and len(part.rows) == 2
    assert part.base["tpot_ms"] == penalised.figures.tpot_ms
    assert part.rows[0].site is not None and part.rows[0].site.file == UPLOAD


@pytest.mark.parametrize("whole_runs", [0, 1, 3])
def test_a_part_of_a_run_is_no_base_and_no_trial(
    penalised: BaseRun, monkeypatch: pytest.MonkeyPatch, whole_runs: int
) -> None:
    """The user interrupts the run that is watched for lines, or one of those without a line."""
    monkeypatch.setattr("schedbench.profiles.worth.worth.spread", lambda *_: nullcontext(map))
    ended: list[Result] = []

    def interrupted(*asked: Any, **options: Any) -> Result:
        result = execute(*asked, **options)
        ended.append(result)
        run = result.run.model_copy(update={"cancelled": len(ended) > whole_runs})
        return result.model_copy(update={"run": run})

    monkeypatch.setattr("schedbench.profiles.worth.worth.execute", interrupted)
    found = worth(penalised.question, penalised.result, lambda _: None, rooms=1)
    assert found.run.further_cancelled and len(ended) == whole_runs + 1
    assert len(found.worth.rows if found.worth else ()) == max(0, whole_runs - 1)


def test_values_are_left_out_only_where_there_are_any() -> None:
    assert without_values(ask("cases/h2d-blocking-output-ids")) is None
    bare = without_values(ask("mixed"))
    assert bare is not None and bare.scenario.device.values == "none"
