"""Gates: their syntax, when they hold, and when they are undecided."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from schedbench.profiles.judge.draws import Firmness
from schedbench.profiles.judge.effects import AddedCount, added
from schedbench.profiles.judge.gates import GateError, parse
from schedbench.profiles.judge.reasons import Reason
from schedbench.profiles.judge.statistics import abba
from schedbench.profiles.judge.verdict import Judgement, judge_blocks, judge_seeds
from schedbench.profiles.record.result import Abstained, Metric
from tests.profiles.judge.conftest import TALLY
from tests.profiles.judge.synthetic import gated

ROOT = Path(__file__).parents[3]


@pytest.fixture
def drop() -> Judgement:
    """Throughput falls by 1 to 3 %."""
    return judge_seeds([100.0] * 5, [98.0, 97.0, 99.0, 98.0, 98.5], "higher")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("throughput:-2%", "output_throughput"),
        ("request:-2%", "request_throughput"),
        ("ttft:+5%", "ttft_ms"),
        ("ttft.p99:+5%", "ttft_ms.p99"),
        ("forward_ms.decode.p50:+1.5%", "forward_ms.decode.p50"),
        ("forward_occupancy:-1%", "forward_occupancy"),
    ],
)
def test_metrics_may_be_named_short(text, name):
    assert parse(text).name == name


def test_counts_are_named_by_kind_stream_and_counter():
    assert parse("decode.steady.schedule.h2d:0").place == ("decode.steady", "schedule", "h2d")
    assert parse("decode.lengths.d2h:0").place == ("decode", "lengths", "d2h")
    assert parse("decode.stream 13.d2h:0").place == ("decode", "stream 13", "d2h")
    assert parse("program.default.sync:4").place == ("program", "default", "sync")
    assert parse("mixed.forward.h2d_pageable:+2").sign == "+"


@pytest.mark.parametrize(
    "text",
    ["throughput", "throughput:2", "throughput:-2", "throughput:fast", "nonsense:-1%", "peak_kv_tokens:+1%",
     "decode.schedule.h2d:5%", "decode.nowhere.h2d:0", "better:decode.schedule.h2d:-1", "better:", ":", "",
     "added:2%", "better:added:0", "added.kernel:0", "added:+1"],
)  # fmt: skip
def test_invalid_gates_are_refused(text):
    with pytest.raises(GateError, match="gate"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tpot_m:-1%", "did you mean 'tpot_ms'"),
        ("troughput:1", "did you mean 'throughput'"),
        ("decode.steady.schedule.h3d:0", "did you mean 'decode.steady.schedule.h2d'"),
        ("added.snc:0", "did you mean 'added.sync'"),
        (
            "foo:1",
            "'foo' is no metric, no KIND.STREAM.COUNTER and no added.COUNTER; `schedbench explain` lists",
        ),
        ("throughput:2", "expected a percentage, such as throughput:2%"),
        ("added.sync:1%", "expected a number of copies and syncs without a sign"),
        ("peak_kv_tokens:+1%", "neither more nor less peak_kv_tokens is better"),
        ("dependency_us:5%", "dependency_us is a counter or a part of a metric"),
        # bounds that nothing can break
        ("throughput:100%", "cannot get"),
        ("throughput:-900%", "cannot get"),
        ("better:ttft_ms:100%", "cannot get"),
        # signs that ask for the opposite
        ("throughput:+1%", "more output_throughput is better; a gate bounds how much worse"),
        ("ttft_ms:-2%", "less ttft_ms is better; a gate bounds how much worse"),
        ("better:throughput:-1%", "less output_throughput is worse; a gate bounds how much worse"),
        ("better:ttft_ms:+2%", "more ttft_ms is worse; a gate bounds how much worse"),
    ],
)
def test_a_wrong_gate_says_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(GateError, match=re.escape(says)):
        parse(text)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("throughput:4%", "passed"),
        ("throughput:-4%", "passed"),
        ("throughput:-2%", "undecided"),
        ("throughput:0.5%", "failed"),
        ("better:throughput:1%", "failed"),
        ("better:throughput:+1%", "failed"),
        ("better:throughput:0%", "failed"),
    ],
)
def test_a_gate_bounds_the_whole_interval(drop, text, outcome):
    found = gated(text, {"output_throughput": drop}, a=[], b=[])
    assert (found.outcome, found.seen) == (outcome, -2.0)


@pytest.mark.parametrize(
    ("text", "longer", "shorter"),
    [
        ("ttft_ms:2%", "failed", "passed"),
        ("ttft_ms:+2%", "failed", "passed"),
        ("ttft_ms:300%", "passed", "passed"),
        ("better:ttft_ms:20%", "failed", "passed"),
        ("better:ttft_ms:-20%", "failed", "passed"),
        ("better:ttft_ms:30%", "failed", "failed"),
    ],
)
def test_worse_and_better_follow_the_direction_of_the_metric(text, longer, shorter):
    for factor, outcome in ((1.27, longer), (0.75, shorter)):
        judged = judge_seeds([100.0] * 5, [100.0 * factor] * 5, "lower")
        assert gated(text, {"ttft_ms": judged}, a=[], b=[]).outcome == outcome


def test_any_rise_from_zero_breaks_a_bound_in_percent():
    risen = judge_seeds([0.0] * 5, [9.0, 8.0, 9.5, 9.0, 7.0], "lower")
    assert risen.verdict == "worse"
    assert judge_seeds([0.0, 9.0, 9.0, 9.0, 9.0], [9.0] * 5, "lower").verdict == "inconclusive"
    found = gated("ttft:5%", {"ttft_ms": risen}, a=[], b=[])
    assert (found.outcome, found.seen) == ("failed", None)


def test_draws_of_the_constants_have_to_agree(drop):
    """A gate that passes with the profile's values is undecided where a draw exceeds it."""
    firm = replace(drop, firmness=Firmness(16, 16, -3.5, -1.0, "host.launch", 0.9))
    assert gated("throughput:4%", {"output_throughput": firm}, a=[], b=[]).outcome == "passed"
    loose = replace(drop, firmness=Firmness(16, 16, -4.5, -1.0, "host.launch", 0.9))
    found = gated("throughput:4%", {"output_throughput": loose}, a=[], b=[])
    assert found.outcome == "undecided" and found.why.startswith("CONSTANTS: the effects of 16 draws")


def test_a_gate_is_undecided_where_draws_have_no_effect(drop):
    """A is 0 under some draws."""
    unheld = replace(drop, firmness=Abstained(abstained="A is 0 in 3 of 16 draws"))
    found = gated("throughput:4%", {"output_throughput": unheld}, a=[], b=[])
    assert (found.outcome, found.why) == ("undecided", "CONSTANTS: A is 0 in 3 of 16 draws")


def test_a_doubtful_measurement_leaves_gates_undecided(drop):
    doubtful = replace(drop, reasons=(Reason.DRIFT,))
    found = gated("throughput:-4%", {"output_throughput": doubtful}, a=[], b=[])
    assert (found.outcome, found.why) == ("undecided", "DRIFT")
    assert gated("throughput:-4%", {}, a=[], b=[]).outcome == "undecided"


def test_a_gate_on_a_metric_that_abstained_has_its_reason(result):
    seen = result()
    metric = Metric(unit="ms", direction="lower", values=(1.0,), p99=Abstained(abstained="needs 100 samples"))
    few = seen.model_copy(
        update={"metrics": {"ttft_ms": metric, "tpot_ms": Abstained(abstained="no decode")}}
    )
    whys = [gated(f"{name}:4%", {}, a=[few], b=[few]).why for name in ("ttft.p99", "tpot", "itl")]
    assert whys == ["needs 100 samples", "no decode", "not measured on both sides"]


def test_a_gate_on_few_measurements_is_undecided():
    """The interval of few equal workloads is a point."""
    for pairs, outcome in ((4, "undecided"), (16, "passed")):
        judged = judge_blocks([1.0 + (side == "b") for side in abba(pairs)], "higher")
        assert gated("throughput:1%", {"output_throughput": judged}, a=[], b=[]).outcome == outcome


def test_a_change_that_is_not_engaged_passes_its_gates(drop):
    idle = replace(drop, reasons=(Reason.NOT_ENGAGED,))
    assert gated("throughput:-4%", {"output_throughput": idle}, a=[], b=[]).outcome == "passed"


@pytest.mark.parametrize(
    ("text", "outcome", "seen"),
    [
        ("decode.schedule.d2h:0", "failed", 3),
        ("decode.schedule.d2h:3", "passed", 3),
        ("decode.schedule.d2h:+1", "failed", 2),
        ("decode.schedule.d2h:+2", "passed", 2),
        ("decode.schedule.d2h:-1", "failed", 2),
        ("decode.schedule.d2d:0", "passed", 0),
        ("verify.schedule.d2h:0", "undecided", None),
    ],
)
def test_counts_are_those_of_the_worst_step(result, text, outcome, seen):
    tally = {"median": 0.0, "mean": 0.5, "max": 1, "steps_with": 5}
    a = result({"per_step.decode.schedule.d2h": tally})
    b = result({"per_step.decode.schedule.d2h": tally | {"max": 3}})
    found = gated(text, {}, a=[a, a], b=[a, b])
    assert (found.outcome, found.seen) == (outcome, seen)


@pytest.mark.parametrize(
    ("text", "outcome", "seen"),
    [
        ("added:0", "failed", 2.0),
        ("added:2", "passed", 2.0),
        ("added.d2h:1", "failed", 2.0),
        ("added.sync:0", "passed", 0.0),
    ],
)
def test_added_counts_are_those_of_the_median_step(result, text, outcome, seen):
    tally = {"max": 9, "steps_with": 5}
    a, b = (
        result({"per_step.decode.schedule.d2h": tally | {"median": n, "mean": n + 0.5}}) for n in (1.0, 3.0)
    )
    found = gated(text, {}, a=[a], b=[b])
    assert (found.outcome, found.seen) == (outcome, seen)
    assert ("decode d2h +2" in found.why) == (outcome == "failed")


@pytest.mark.parametrize(
    ("count", "old_count", "found"),
    [
        (88, 700, [AddedCount("decode", "sync", 0.125714, 0.125714)]),  # in every eighth step
        (6, 700, []),  # by chance
        (88, 612, []),  # the line of A does as much less
        (700, 0, []),  # the line of A was edited
    ],
)
def test_a_line_that_only_some_steps_of_b_run_is_added(result, count, old_count, found):
    a = result()
    old = a.syncs[0]
    new = old.model_copy(
        update={"count": count, "site": old.site.model_copy(update={"statement": "lens.tolist()"})}
    )
    kept = [old.model_copy(update={"count": old_count})] if old_count else []
    b = a.model_copy(update={"syncs": (new, *kept, *a.syncs[1:])})
    assert added([a], [b]) == found
    assert gated("added.sync:0", {}, a=[a], b=[b]).outcome == ("failed" if found else "passed")


def test_counters_of_an_added_gate_count_together(result):
    """Steps of a kind that only B has are not compared; a bound on B's worst step needs no such step of A's."""
    counts = {"per_step.decode.schedule.d2h": TALLY, "per_step.decode.schedule.sync": TALLY}
    b = result({**counts, "per_step.verify": {"steps": 5, "schedule": {"h2d": TALLY}}})
    found = gated("added:1", {}, a=[result()], b=[b])
    why = "decode sync +1, decode d2h +1; verify steps, which A has none of, are not compared"
    assert found[1:] == ("failed", 2.0, why)
    bounds = (gated(f"verify.schedule.h2d:{n}", {}, a=[result()], b=[b]) for n in ("0", "+0"))
    assert [one.outcome for one in bounds] == ["failed", "undecided"]


def test_added_is_undecided_for_kinds_on_one_side_only(result):
    a, b = result(), result({"per_step": {}})
    assert gated("added:0", {}, a=[a], b=[b]).outcome == "undecided"


def test_every_gate_in_the_docs_is_valid():
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.yml")]
    named = {text for file in files for text in re.findall(r"--gate ([\w.:%+-]+\d%?)", file.read_text())}
    assert "added.sync:0" in named
    assert all(parse(text).text == text for text in named)
