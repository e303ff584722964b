"""From trials to verdicts: conditions that prevent one, the metrics that decide, and the document."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from schedbench.cli import compare_page
from schedbench.cli.answers import ComparisonAnswer
from schedbench.profiles.judge.compare import VerdictRules, judge, overall
from schedbench.profiles.judge.conclusion import conclusion
from schedbench.profiles.judge.document import document
from schedbench.profiles.judge.gates import parse
from schedbench.profiles.judge.reasons import Reason
from schedbench.profiles.judge.trials import Sample, Trials, compared
from schedbench.profiles.judge.verdict import Judgement, judge_seeds
from schedbench.profiles.record.result import canonical
from tests.cli.pages import printed
from tests.profiles.judge.conftest import MEASURED, OTHER_STEPS, OTHER_TOKENS, STEPS, TALLY, rows

ABSTAINED = MEASURED | {"outputs": {"abstained": "CUDA"}}
RUN = {"command": "schedbench compare x y", "cancelled": False}
FASTER = [103.0, 102.5, 103.5, 103.0, 104.0]


@pytest.fixture
def trials(result):
    """Five seeds; B's throughputs as given, every step different by default."""

    def make(throughputs=FASTER, *, steps=OTHER_STEPS, a=None, b=None) -> Trials:
        side_a = tuple(Sample(result(a, seed=seed), STEPS) for seed in range(len(throughputs)))
        side_b = tuple(
            Sample(result(b, seed=seed, throughput=value), steps) for seed, value in enumerate(throughputs)
        )
        return compared(Trials("seeds", side_a, side_b))

    return make


@pytest.fixture
def blocks(result):
    """Measured pairs; A is about 100, B as many percent more."""

    def make(effect, *, pairs=20, steps=OTHER_STEPS, a=None, b=None) -> Trials:
        sides = []
        for share, changes in ((0.0, a), (effect, b)):
            values = [(100 + 0.3 * ((7 * at) % 5 - 2)) * (1 + share / 100) for at in range(pairs)]
            whole = ABSTAINED | (changes or {})
            sides.append(tuple(Sample(result(whole, throughput=value), STEPS) for value in values))
        return compared(Trials("blocks", sides[0], tuple(s._replace(steps=steps) for s in sides[1])))

    return make


def sentence(found) -> str:
    return conclusion(found, a="x", b="y")


def written(found) -> dict:
    return document(found, a="x", b="y", run=RUN)


def page(content, *, width: int = 120) -> str:
    return printed(compare_page.page(content, width), width)


def test_a_faster_side_with_the_same_tokens_is_better(trials):
    found = judge(trials())
    assert (found.verdict, found.reasons, found.trials.tokens) == ("better", (), "equal")
    assert found.metrics["output_throughput"].delta == pytest.approx(3)
    assert found.metrics["tpot_ms"].verdict == "no change"
    assert not (found.broken or found.undecided)


@pytest.mark.parametrize(("temperature", "drawn"), [(0.7, True), (0.0, False)])
@pytest.mark.parametrize("engine", [{"name": "toy:.", "sha256": "0"}, None])
def test_an_engine_may_draw_other_tokens_at_other_times(trials, temperature, drawn, engine):
    asked = {"scenario.expanded.workload.sampling": {"temperature": temperature}, "labels.engine": engine}
    found = judge(trials(a=asked, b=asked | OTHER_TOKENS))
    hint = written(found)["comparison"]["hint"] or ""
    assert ("workload.sampling.temperature=0" in hint) == (drawn and engine is not None)


def test_other_tokens_prevent_a_verdict(trials):
    found = judge(trials(b=OTHER_TOKENS))
    assert (found.verdict, found.reasons) == ("inconclusive", (Reason.OUTPUT_DIFF,))
    assert {judged.verdict for judged in found.metrics.values()} == {"inconclusive"}
    assert found.broken
    text = sentence(found)
    assert text.startswith(
        "y against x on mixed (emulated h200, 5 seeds): inconclusive: OUTPUT_DIFF; outputs differ"
    )
    assert "throughput" not in text
    same_steps = judge(trials([100.0] * 5, b=OTHER_TOKENS, steps=STEPS))
    assert same_steps.reasons == (Reason.OUTPUT_DIFF,)


def test_other_tokens_may_be_allowed(trials):
    found = judge(trials(b=OTHER_TOKENS), VerdictRules(allow_divergence=True))
    assert (found.verdict, found.trials.tokens, found.broken) == ("better", "different", False)


def test_abstained_tokens_prevent_no_verdict(trials):
    simulated = {"outputs": {"abstained": "acceptance is simulated"}}
    found = judge(trials(a=simulated, b=simulated))
    assert (found.verdict, found.trials.tokens) == ("better", "not applicable")


def test_requests_that_failed_are_named_with_their_side(trials):
    lost = {"requests": [{**rows(r0=[5])[0], "status": "failed"}, *rows(r1=[6])]}
    assert "; B: 5 of 10 requests failed; " in sentence(judge(trials(b=lost)))
    both = sentence(judge(trials(a=lost, b={**lost, **OTHER_TOKENS})))
    assert both.endswith("; 5 of 10 requests failed on each side.")


def test_a_change_that_is_not_engaged_gets_no_verdict(trials, blocks):
    found = judge(blocks(0, steps=STEPS))
    assert (found.verdict, found.reasons) == ("inconclusive", (Reason.NOT_ENGAGED,))
    assert judge(trials([100.0] * 5, steps=STEPS)).reasons == (Reason.NOT_ENGAGED,)
    assert judge(trials([100.0] * 5, steps=STEPS), VerdictRules(min_engagement=0)).verdict == "no change"


def test_exact_times_show_a_change_of_order_alone(trials):
    found = judge(trials(steps=STEPS))
    assert (found.verdict, found.reasons) == ("better", ())
    assert (
        "; engaged by order, waits or batches alone: as many device operations of each kind in all 50 steps; "
        in sentence(found)
    )


def test_times_measured_in_turns_show_a_change_of_host_work(blocks):
    found = judge(blocks(3, steps=STEPS))
    assert (found.verdict, found.reasons) == ("better", ())
    assert "; engaged by host work, order, waits or batches alone: as many" in sentence(found)


def test_measured_times_that_are_undecided_do_not_show_that_nothing_happened(blocks):
    """More pairs may show a change of host work."""
    found = judge(blocks(0.8, pairs=6, steps=STEPS))
    assert (found.verdict, found.reasons) == ("inconclusive", (Reason.LOW_N,))


def test_too_few_engaged_steps_that_show_no_change_give_no_verdict(trials):
    few, rules = (*STEPS[:-1], OTHER_STEPS[-1]), VerdictRules(min_engagement=11)
    assert judge(trials([100.0] * 5, steps=few)).engagement.percent == pytest.approx(10)
    assert judge(trials([100.0] * 5, steps=few), rules).reasons == (Reason.NOT_ENGAGED,)
    assert judge(trials(steps=few), rules).verdict == "better"


def test_profiled_runs_are_not_timed(trials):
    profiled = {"labels.profiled": True}
    assert judge(trials(a=profiled, b=profiled)).reasons == (Reason.PROFILED,)


def test_measured_blocks_get_a_verdict(blocks):
    found = judge(blocks(5))
    judged = found.metrics["output_throughput"]
    assert (found.verdict, judged.verdict, judged.n) == ("better", "better", 20)
    assert judged.floor is not None and judged.p_value is not None and judged.slot is not None


def test_measured_blocks_of_other_environments_get_no_verdict(blocks):
    other = blocks(5, b={"environment.torch": "2.12"})
    assert judge(other).reasons == (Reason.CONFIG_DIFF,)
    same = blocks(5)
    assert judge(replace(same, b=(*same.b[:-1], other.b[-1]))).reasons == (Reason.CONFIG_DIFF,)


def test_emulated_times_do_not_depend_on_the_environment(trials):
    found = judge(trials(b={"environment.torch": "2.12"}))
    assert found.verdict == "better"
    assert [difference.key for difference in found.environment] == ["torch"]


def change(percent, direction="higher", *, seeds=5) -> Judgement:
    return judge_seeds([100.0] * seeds, [100.0 + percent] * seeds, direction)


def test_effects_of_1_percent_or_more_count_against_each_other():
    better, worse, same, unsure = change(10), change(10, "lower"), change(0), change(10, "lower", seeds=2)
    small, loss = change(0.9), change(0.9, "lower")
    assert (small.verdict, loss.verdict) == ("better", "worse")
    for metrics, verdict in (
        ([better, same], "better"),
        ([worse, same, unsure], "worse"),
        ([better, worse], "trade-off"),
        ([better, loss], "better"),
        ([loss], "worse"),
        ([small, loss], "no change"),
        ([same, same], "no change"),
    ):
        assert overall(metrics) == (verdict, ())
    assert overall([same, unsure]) == overall([small, loss, unsure]) == ("inconclusive", (Reason.LOW_N,))
    assert overall([]) == ("inconclusive", ())


def test_calls_without_effect_that_one_side_makes_are_named(trials):
    def engine(*calls):
        return {"labels.engine": {"name": "toy:.", "sha256": "0", "edge": {"answered_by_default": calls}}}

    found = judge(trials([100.0] * 5, a=engine("f"), b=engine("f", "cuda.empty_cache")))
    said = compare_page.notes(written(found), 9)
    assert "only B makes calls that have no effect or cost here: cuda.empty_cache" in said


def test_a_loss_that_is_too_small_for_a_trade_off_is_named(trials):
    metrics = {"output_throughput": change(3), "tpot_ms": change(0.9, "lower")}
    found = replace(judge(trials([100.0] * 5)), metrics=metrics, verdict="better", reasons=())
    assert "better, though TPOT worse by less than 1 %; output" in sentence(found)
    gated = VerdictRules(gates=(parse("throughput:1%"),))
    found = replace(found, rules=gated, headline=("output_throughput", "ttft_ms"))
    assert "better by the gated metrics output throughput and TTFT; output" in sentence(found)


def test_a_wait_of_a_stream_that_b_lacks_is_named(trials):
    wait = {
        "site": {"file": "a.py", "function": "f", "line": 1, "statement": "s.wait_stream(t)"}, "range": "prepare",
        "kind": "decode", "stream": "forward", "call": "cudaStreamWaitEvent", "sync": False, "count": 700,
        "steady": 0, "host_us": 5.0, "exposed_us": 0.0,
    }  # fmt: skip
    text = sentence(judge(trials(a={"syncs": [wait]}, b={"syncs": []})))
    assert text.endswith("; fewer stream waits, 1 per decode step: check judges the order.")
    assert "stream waits" not in sentence(judge(trials(a={"syncs": []}, b={"syncs": [wait]})))
    for changes, unasked in (({}, True), ({"hazards": {"findings": []}}, False)):
        said = compare_page.notes(written(judge(trials(a=changes, b=changes))), 9)
        assert any(note.startswith("not asked: whether data is read too early") for note in said) == unasked


def test_a_new_sync_in_every_step_is_reported_apart(trials):
    more = {"per_step.decode.schedule.sync": TALLY}
    found = judge(trials([100.0] * 5, b=more), VerdictRules(gates=(parse("added.sync:0"),)))
    assert [(one.kind, one.counter, one.more) for one in found.added] == [("decode", "sync", 1.0)]
    often = judge(trials([100.0] * 5, b={"per_step.decode.schedule.sync": TALLY | {"mean": 0.63}}))
    assert "5 seeds): adds 0.63 blocking syncs per decode step; " in sentence(often)
    assert (found.verdict, found.broken, found.headline[0]) == ("no change", True, "output_throughput")
    text = sentence(found)
    assert "5 seeds): adds 1 blocking sync per decode step; no change here; " in text
    seldom = {"per_step.decode.schedule.sync": TALLY | {"median": 0.0, "mean": 0.4}}
    assert judge(trials([100.0] * 5, b=seldom)).added == []
    assert judge(trials([100.0] * 5, a=more, b={"per_step.decode.forward.sync": TALLY})).added == []  # moved


def test_a_new_sync_is_reported_where_too_few_steps_are_engaged(trials):
    more = {"per_step.mixed.schedule.sync": TALLY | {"steps_with": 40}}
    seen = trials([100.0] * 5, steps=(*STEPS[:-1], OTHER_STEPS[-1]), b=more)
    text = sentence(judge(seen, VerdictRules(min_engagement=11)))
    assert "adds 1 blocking sync per mixed step; inconclusive: NOT_ENGAGED, engaged in 5 of 50" in text


def test_what_the_median_step_does_on_the_device_comes_before_rare_copies(trials):
    rare = {"max": 4, "mean": 0.26, "median": 0.0, "steps_with": 60}
    launches = {"max": 30, "mean": 11.5, "median": 11.0, "steps_with": 700}
    fewer = {"per_step.decode.schedule.h2d": rare, "per_step.decode.schedule.kernel": launches}
    text = sentence(judge(trials(b=fewer)))
    assert "; per step decode schedule kernel 12.5 -> 11.5, decode schedule h2d 0.25 -> 0.26." in text
    hardly = {"per_step.decode.schedule.h2d": rare | {"mean": 0.250001}}
    assert "; copies and syncs per step equal to four digits." in sentence(judge(trials(b=hardly)))


def test_copies_from_other_memory_of_the_host_are_named(trials):
    pinned, pageable = (
        {f"per_step.decode.schedule.h2d_{memory}": TALLY} for memory in ("pinned", "pageable")
    )
    text = sentence(judge(trials(a=pinned, b=pageable)))
    assert "; per step decode schedule h2d_pageable 0 -> 1, decode schedule h2d_pinned 1 -> 0." in text


def test_requests_that_ended_otherwise_are_reported(trials, result):
    rows = [row.model_dump(mode="json") for row in result().requests]
    rows[0]["reason"] = "stop"
    text = sentence(judge(trials(b={"requests": rows})))
    said = "request r0 ended finished (stop) instead of finished (length) and 4 more"
    assert f"tokens equal, but {said}; " in text
    text = sentence(judge(trials(b={"requests": rows, **OTHER_TOKENS})))
    assert "; outputs differ, first with seed 0" in text and f"; {said}; 5 of 10 " in text


def test_a_hazard_that_only_b_has_breaks_the_comparison(trials):
    """Line numbers do not identify it."""

    def watched(*lines):
        site = {"file": "a.py", "function": "f"}
        at = [{"op": "copy", "stream": "s", "site": site | {"statement": f"x{n}", "line": n}} for n in lines]
        finding = [
            {"resource": f"x{n}", "first": one, "second": None, "missing": "no wait"}
            for n, one in zip(lines, at, strict=True)
        ]
        return {"hazards": {"known": [], "findings": finding}}

    found = judge(trials([100.0] * 5, a=watched(1), b=watched(1, 2)))
    assert [one.resource for one in found.hazards] == ["x2"] and found.broken
    assert not ComparisonAnswer(written(found)).passed  # as loaded from a file
    assert ": 1 hazard that A has not: x2: no wait; no change" in sentence(found)
    assert not judge(trials([100.0] * 5, a=watched(1, 2), b=watched(1))).broken
    unknown = judge(trials([100.0] * 5, a={"hazards": {"abstained": "not watched"}}, b=watched(1)))
    assert not unknown.broken and "only B was watched for hazards." in sentence(unknown)


def test_one_run_of_a_workload_without_randomness_is_enough(trials):
    seen = trials([103.0])
    assert judge(seen).reasons == (Reason.LOW_N,)
    found = judge(replace(seen, one_run=True))
    assert found.verdict == "better" and "(emulated h200, one run)" in sentence(found)


def test_gates_choose_the_headline_metrics(trials):
    found = judge(trials([90.0] * 5), VerdictRules(gates=(parse("tpot:+1%"), parse("throughput:-2%"))))
    assert found.headline == ("tpot_ms", "output_throughput")
    assert [gate.outcome for gate in found.gates] == ["passed", "failed"]
    assert (found.verdict, found.broken) == ("worse", True)


def test_the_document_keeps_every_raw_value_and_is_json(trials):
    found = judge(trials())
    content = json.loads(canonical(document(found, a="x=1", b="x=2", run={"id": "r"})))
    comparison = content["comparison"]
    assert comparison["metrics"]["output_throughput"]["values"]["b"] == FASTER
    assert comparison["candidate"]["label"] == "x=2"
    assert [run["seed"] for run in comparison["baseline"]["runs"]] == [0, 1, 2, 3, 4]
    assert comparison["engagement"]["kinds"] == {"decode": {"differing": 50, "steps": 50}}


def test_a_noisy_measurement_names_the_needed_pairs(blocks, result):
    noisy = [x if at % 3 else x * 1.05 for at, x in enumerate([100.0] * 20)]
    trials = blocks(0)
    side_b = tuple(
        s._replace(result=result(ABSTAINED, throughput=x)) for s, x in zip(trials.b, noisy, strict=True)
    )
    found = judge(Trials("blocks", trials.a, side_b))
    judged = found.metrics["output_throughput"]
    hint = written(found)["comparison"]["hint"]
    assert judged.reasons == (Reason.LOW_N,) and judged.needed is not None
    assert hint.startswith(f"{judged.needed} pairs instead of 20, about ")
    assert hint.endswith(" minutes more, would resolve 1 % of output throughput")


@pytest.mark.parametrize(
    ("throughputs", "hint"),
    [
        (
            [103.0] * 3,
            "a verdict on output throughput needs at least 5 seeds instead of 3, if they spread alike",
        ),
        (
            [100.0, 99.2, 99.8, 100.3, 100.9],
            "30 seeds instead of 5, about 1 minute more, would resolve 1 % of output throughput",
        ),
        (
            [100.4, 100.5, 100.6, 100.5, 100.6],
            "more seeds would hardly decide output throughput, which changes by about 0.5 %, the smallest effect of",
        ),
        (FASTER, None),
    ],
)
def test_too_few_seeds_name_the_number_that_a_verdict_needs(trials, throughputs, hint):
    found = document(judge(trials(throughputs)), a="a", b="b", run=RUN)
    assert (found["comparison"]["hint"] or "").startswith(hint or "")
    assert (found["comparison"]["hint"] is None) == (hint is None)


def test_the_conclusion_of_a_faster_side(trials):
    text = conclusion(judge(trials()), a="barrier=top", b="barrier=off")
    assert text == (
        "barrier=off against barrier=top on mixed (emulated h200, 5 seeds): better; "
        "output throughput +3.00 % [+2.50, +4.00], TTFT +0.00 % [+0.00, +0.00], TPOT +0.00 % [+0.00, +0.00]; "
        "tokens equal; 5 of 10 requests refused on each side; "
        "engaged in 50 of 50 decode steps (100.0 %); copies and syncs per step equal."
    )


def test_a_metric_without_a_verdict_does_not_hide_that_of_another(trials, result):
    seen, times = trials([100.0] * 5), (12.0, 13.0, 12.5, 12.4, 12.6)
    spread = tuple(Sample(result({"metrics.ttft_ms.values": [time]}), OTHER_STEPS) for time in times)
    found = judge(Trials("seeds", seen.a, spread))
    text = sentence(found)
    assert (found.verdict, found.reasons) == ("inconclusive", (Reason.LOW_N,))
    assert (
        "5 seeds): no change in output throughput and TPOT; inconclusive in TTFT: LOW_N, by the spread over "
        "seeds the change is neither surely within 0.5 %, the smallest effect of interest, nor surely beyond it; output"
        in text
    )


def test_the_conclusion_begins_with_the_metrics_that_decide(trials):
    slower = {"metrics.tpot_ms.values": [4.2]}
    text = sentence(judge(trials([100.3, 99.8, 101.0, 99.0, 100.0], b=slower)))
    assert "5 seeds): worse; TPOT +34.40 % [+34.40, +34.40], TTFT" in text
    assert "; undecided: output throughput +0.00 % [-1.00, +1.00]; tokens" in text


def test_tpot_that_changes_where_decodes_do_not_is_explained(trials):
    prefills, others = (
        tuple(one._replace(kind="prefill") for one in steps) for steps in (STEPS, OTHER_STEPS)
    )
    more = {"tpot_ms": 2.0, "queue_ms": 99.0, "retractions": 3.0}
    seen = trials(b={f"metrics.{name}.values": [value] for name, value in more.items()})
    before = tuple(one._replace(steps=(*STEPS, *prefills)) for one in seen.a)

    def said_of(decodes) -> str:
        after = tuple(one._replace(steps=(*decodes, *others)) for one in seen.b)
        return sentence(judge(replace(seen, a=before, b=after)))

    text = said_of(STEPS)
    assert (
        "engaged in 50 of 50 prefill steps (100.0 %); as many device operations of each kind in all 50 decode steps, "
        "but TPOT includes the prefill steps and the idle time between two tokens; time in the queue +"
        in text
    )
    assert re.search(r" in the queue \+[^;]+ %[^;]*, retractions [^;]+; copies", text)
    assert "time in the queue" not in said_of(OTHER_STEPS)


def test_the_conclusion_of_equal_sides(trials):
    text = sentence(judge(trials([100.0] * 5, steps=STEPS)))
    assert text == (
        "y against x on mixed (emulated h200, 5 seeds): inconclusive: NOT_ENGAGED, as many device operations of each "
        "kind in all 50 steps; A and B are the same engine; every metric equal to the last digit; tokens equal; "
        "5 of 10 requests refused on each side."
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"sha256": "2" * 64},
            "their sources differ: check judges order and values, which are not counted, "
            "and --set device.host=measured the host's own work",
        ),
        ({"ref": "y"}, "A and B have the same source"),
    ],
)
def test_the_conclusion_of_equal_counts_says_whether_the_sources_differ(trials, changes, says):
    engine = {"name": "sglang", "ref": "x", "sha256": "1" * 64, "edge": {}}
    sides = {side: {"labels.engine": part} for side, part in (("a", engine), ("b", engine | changes))}
    text = sentence(judge(trials([100.0] * 5, steps=STEPS, **sides)))
    assert f"; {says}; every metric" in text


@pytest.mark.parametrize(
    ("throughputs", "named"),
    [
        (FASTER, True),
        ([99.0, 101.0, 99.5, 101.5, 100.31], False),
        ([100.05, 100.06, 100.05, 100.04, 100.05], False),
    ],
)
def test_the_conclusion_attributes_no_change_that_is_small_or_of_unknown_sign(trials, throughputs, named):
    found = judge(trials(throughputs))
    line = next(line for line in found.lines if line.site)._replace(
        worth_pct=found.metrics["output_throughput"].delta
    )
    text = sentence(replace(found, lines=[line]))
    assert ("come from" in text) == ("; of the " in text) == named
    assert f"of the {line.worth_pct:+.2f} %" in text or not named


def test_the_conclusion_of_other_batches_names_what_they_explain(trials):
    seen = trials(steps=STEPS[:-1])
    text = sentence(judge(seen))
    assert "steps differ in no more than their batches explain" in text
    assert "as many device operations" not in text
    others = tuple(sample._replace(steps=OTHER_STEPS) for sample in seen.a)
    text = sentence(judge(Trials("seeds", seen.a, others)))
    assert "engaged in 50 of 50 decode steps (100.0 %)" in text


def test_engagement_is_unknown_without_source_lines(trials):
    nothing = {"copies": [], "syncs": [], "idle": {"abstained": "clocks"}, "labels.world": "distributed"}
    seen = trials(steps=None, b=nothing)
    found = judge(seen)
    assert Reason.NOT_ENGAGED not in found.reasons
    text = sentence(found)
    assert "which steps differ is not known, source lines were not recorded" in text and "engaged" not in text
    content = written(found)
    assert content["comparison"]["lines"] == []
    assert content["comparison"]["candidate"]["unrecorded"] == "clocks"
    shown = " ".join(page(content).split())
    assert "B recorded no times and no source lines: clocks" in shown and "distributed world" in shown
    assert "copies & syncs per step" not in shown and "where the GPU waited" not in shown
    idle = seen.a[0].result.document()["idle"]
    rank = {"name": "rank 0", "role": "data", "per_step": {}, "idle": idle, "metrics": {}}
    apart = nothing | {"idle": {"abstained": "each rank has its own: see ranks"}, "ranks": [rank]}
    assert written(judge(trials(b=apart)))["comparison"]["candidate"]["unrecorded"] is None


def test_kinds_of_steps_on_one_side_only_are_listed_and_not_judged(trials):
    more = {"per_step.prebuilt": {"steps": 10, "schedule": {"h2d": TALLY}}}
    found = judge(trials(b=more))
    shown = page(written(found))
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("prebuilt ") and " h2d " in line]
    assert row == ["prebuilt", "schedule", "h2d", "–", "1.00", "/", "1", "–"]
    assert "A has no prebuilt steps" in shown and "0 / 0" not in shown
    assert "prebuilt schedule" not in sentence(found)


def test_the_page_has_the_reason_for_unknown_gpu_waits(trials):
    each = {"idle": {"abstained": "each rank has its own: see ranks"}}
    shown = page(document(judge(trials(a=each, b=each)), a="x", b="y", run=RUN))
    assert "each rank has its own: see ranks" in " ".join(shown.split())
    assert "kernel gap" not in shown


def test_no_figure_of_a_source_line_is_cut_on_a_narrow_page(trials):
    content = document(judge(trials()), a="x", b="y", run=RUN)
    line = content["comparison"]["lines"][0] | {"site": None, "what": "cudaStreamSynchronize"}
    content["comparison"]["lines"] = [line | {"a": 0.867, "b": 0.7796, "exposed_a": 0.0, "exposed_b": 0.0}]
    assert "cudaStreamSynchronize   0.867   0.780   -0.0874" in page(content, width=80)
