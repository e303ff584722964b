"""Sweeps: their arguments, the better side of a cell, where it changes, and the reuse of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from schedbench.profiles.judge.effects import MetricValue
from schedbench.profiles.judge.sides import SideError
from schedbench.profiles.ranks.execute import Options
from schedbench.profiles.sweeps.break_even import DrawnCrossings, crossings, document
from schedbench.profiles.sweeps.runs import Runs
from schedbench.profiles.sweeps.sweep import (
    OVERLAP_PAYS,
    Axis,
    Cell,
    SweepError,
    SweepPlan,
    cells,
    has_own_sides,
    planned,
)
from schedbench.scenarios.problems import ScenarioError

FEW = (
    "workload.requests=4",
    "workload.prompt_tokens={dist: fixed, value: 64}",
    "workload.output_tokens={dist: fixed, value: 24}",
    "measure.warmup_requests=0",
)
OPTIONS = Options(device="vgpu")


def plan(*over: str, sides: Sequence[str] = OVERLAP_PAYS, metric: str = "throughput") -> SweepPlan:
    return planned("overlap_on", over, sides=sides, overrides=FEW, metric=metric)


def cell(*place: str, a: float = 100.0, b: float, direction: Literal["higher", "lower"] = "higher") -> Cell:
    return Cell(place, values=(MetricValue(a, "tokens/s", direction), MetricValue(b, "tok/s", direction)))


def test_shortened_keys_are_completed_and_numbers_sorted() -> None:
    asked = plan("concurrency=8,1", "relay=latest", metric="ttft.p99")
    assert asked.axes == (
        Axis("workload.arrival.concurrency", ("1", "8")),
        Axis("engine.relay", ("latest",)),
    )
    assert asked.metric == "ttft_ms.p99"
    assert list(asked.places) == [("1", "latest"), ("8", "latest")]
    assert asked.overrides_at(("8", "latest"), asked.sides[1])[-3:] == (
        "workload.arrival.concurrency=8",
        "engine.relay=latest",
        "engine.overlap=true",
    )


def test_values_may_hold_commas_in_brackets() -> None:
    axis = plan("arrival={process: closed, concurrency: 1},burst").axes[0]
    assert axis.values == ("{process: closed, concurrency: 1}", "burst")


@pytest.mark.parametrize(
    ("over", "options", "error", "message"),
    [
        ((), {}, SweepError, "a sweep needs --over"),
        (("concurrency",), {}, SweepError, "expected key=v1,v2"),
        (("concurrency=",), {}, SweepError, "expected key=v1,v2"),
        (("concurency=1",), {}, ScenarioError, "did you mean 'concurrency'"),
        (("overlap=true",), {}, SweepError, "engine.overlap: set twice"),
        (("page_size=1", "page_size=2"), {}, SweepError, "engine.page_size: set twice"),
        (("page_size=1,2,1.0",), {}, SweepError, "page_size: given twice: 1, 1.0"),
        (("page_size=1",), {"metric": "speed"}, SweepError, "no metric 'speed'"),
        (("page_size=1",), {"metric": "ttftt"}, SweepError, "did you mean 'ttft'"),
        (("page_size=1",), {"metric": "peak_kv_tokens"}, SweepError, "no metric 'peak_kv_tokens'"),
        (("page_size=1",), {"sides": ("git:HEAD", "")}, SweepError, "for compare"),
        (("page_size=1",), {"sides": ("latest", "")}, SideError, "is no side"),
    ],
)
def test_invalid_arguments_are_refused(
    over: tuple[str, ...], options, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(*over, **options)


def test_the_key_of_the_usual_sides_may_be_an_axis() -> None:
    assert has_own_sides(["page_size=1", "overlap=true,false"])
    assert not has_own_sides(["page_size=1"])


def test_the_better_side_depends_on_the_metric() -> None:
    assert cell("1", b=110).tone == "better"
    assert cell("1", b=110, direction="lower").tone == "worse"
    assert cell("1", b=100).tone == "no change"
    assert cell("1", b=110).delta == pytest.approx(10)
    assert cell("1", a=0, b=1).tone == "better"
    assert (cell("1", a=0, b=1).delta is None, Cell(("1",), refusal="so").tone) == (False, None)


def test_slight_differences_are_no_change_and_those_of_different_tokens_are_not_judged() -> None:
    assert (cell("1", b=100.4).tone, cell("1", b=100.4).sign) == ("no change", "better")
    assert replace(cell("1", b=110), tokens="different").tone is None


def test_a_change_of_sign_to_slight_differences_says_so() -> None:
    asked = plan("concurrency=1,2,4,8")
    found = [cell(at, b=b) for at, b in zip(asked.axes[0].values, (90, 100.2, 110, 99.8), strict=True)]
    content = document(asked, found, DrawnCrossings({}), run={"cancelled": False})
    assert content["conclusion"].endswith(
        "better beyond concurrency 1 … 2, worse by less than 0.5 % beyond concurrency 4 … 8."
    )


def test_signs_change_between_neighbours_of_the_first_axis() -> None:
    asked = plan("concurrency=1,2,4,8,16", "preset=tiny-llama,llama-3-8b")
    values = {"tiny-llama": (90, 95, 99, 98, 97), "llama-3-8b": (90, 100, 104, 103, 98)}
    found = [
        cell(count, preset, b=b)
        for preset, row in values.items()
        for count, b in zip(asked.axes[0].values, row, strict=True)
    ]
    assert [tuple(crossing) for crossing in crossings(asked, found)] == [
        (("llama-3-8b",), "1", "4", "better"),  # at 2 there is no sign
        (("llama-3-8b",), "8", "16", "worse"),
    ]


def test_refused_cells_are_left_out_of_sign_changes() -> None:
    asked = plan("concurrency=1,2,4")
    found = [cell("1", b=90), Cell(("2",), refusal="no"), cell("4", b=110)]
    assert [tuple(crossing) for crossing in crossings(asked, found)] == [((), "1", "4", "better")]


def test_overlap_hurts_a_tiny_model_and_helps_a_large_one() -> None:
    asked = plan("model.preset=tiny-llama,llama-3-8b", "concurrency=1")
    found = list(cells(asked, Runs(OPTIONS)))
    assert [one.tone for one in found] == ["worse", "better"]
    assert [one.tokens for one in found] == ["equal", "equal"]
    (crossing,) = crossings(asked, found)
    assert crossing == (("1",), "tiny-llama", "llama-3-8b", "better")
    content = document(asked, found, DrawnCrossings({}, "not asked for"), run={"cancelled": False})
    assert content["sweep"]["exact"] is True
    other = found[1].labels[1].model_copy(update={"host": "measured"})
    mixed = [found[0], replace(found[1], labels=(other, other), packed=())]  # whose results are not opened
    said = document(asked, mixed, DrawnCrossings({}), run={"cancelled": False})
    kinds = said["labels"]["host"], said["sweep"]["exact"], said["hardware"]
    assert kinds == ("measured and modelled", False, ["h200"])
    assert content["break_even"] == [
        {
            "key": "model.preset",
            "at": {"workload.arrival.concurrency": "1"},
            "between": ["tiny-llama", "llama-3-8b"],
            "beyond": "better",
            "slight": False,
            "drawn": None,
        }
    ]


def test_a_sweep_of_one_side_lists_its_values() -> None:
    (one,) = cells(plan("concurrency=2", sides=()), Runs(OPTIONS))
    assert (len(one.values), one.delta, one.tone) == (1, None, None)
    assert one.values[0].unit == "tokens/s"


def test_cells_that_cannot_run_have_their_reason() -> None:
    asked = plan("mixed_chunk=true", "chunked_prefill_size=none", "kv_tokens=131072,64")
    refused, starved = cells(asked, Runs(OPTIONS))
    assert refused.refusal.startswith("engine.mixed_chunk: mixed chunk cannot be combined")
    (starved,) = cells(plan("kv_tokens=64"), Runs(OPTIONS))
    assert starved.refusal.startswith("no request finished; the reason of the first:")
    assert (refused.failed, starved.failed) == (False, True)
    (absent,) = cells(plan("output_tokens.value=1", metric="tpot"), Runs(OPTIONS))
    assert absent.refusal == "tpot_ms: no request ran long enough"


def test_requests_that_were_not_served_are_counted() -> None:
    lengths = "prompt_tokens={dist: uniform, min: 8, max: 200}"
    (refused,) = cells(plan(lengths, sides=("kv_tokens=100", "")), Runs(OPTIONS))
    assert refused.remark == "kv_tokens=100: 2 of 4 requests refused"
    (clipped,) = cells(plan("preset=tiny-llama", "prompt_tokens=9000"), Runs(OPTIONS))
    assert clipped.remark == "4 of 4 requests clipped to the context on each side"


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (("relay=latest,nosuch",), r"--over engine\.relay=nosuch: no cell could run: .*unknown relay state"),
        (("concurrency=1", "preset=tiny-llama,tiny-lama"), r"--over model\.preset=tiny-lama: .*did you mean"),
    ],
)
def test_a_value_that_no_cell_can_use_is_an_error_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, over: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(Runs, "answers", None)
    with pytest.raises(SweepError, match=message):
        next(cells(plan(*over), Runs(OPTIONS)))


def test_results_of_the_same_question_are_reused(tmp_path: Path) -> None:
    first = plan("concurrency=1,2", sides=())
    before = list(cells(first, Runs(OPTIONS, folder=tmp_path)))
    stamps = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert stamps.keys() == {name for one in before for name in one.files}

    more = plan("concurrency=2,3", sides=())
    after = list(cells(more, Runs(OPTIONS, folder=tmp_path, resume=True)))
    assert after[0] == before[1]
    assert {path.name for path in tmp_path.iterdir()} - stamps.keys() == set(after[1].files)
    assert all((tmp_path / name).stat().st_mtime_ns == stamp for name, stamp in stamps.items())

    again = list(cells(first, Runs(OPTIONS, folder=tmp_path)))
    assert [one.values for one in again] == [one.values for one in before]
    assert all((tmp_path / name).stat().st_mtime_ns > stamp for name, stamp in stamps.items())


def test_a_broken_file_is_run_again(tmp_path: Path) -> None:
    asked = plan("concurrency=1", sides=())
    (one,) = cells(asked, Runs(OPTIONS, folder=tmp_path))
    (tmp_path / one.files[0]).write_text("{")
    assert list(cells(asked, Runs(OPTIONS, folder=tmp_path, resume=True))) == [one]
