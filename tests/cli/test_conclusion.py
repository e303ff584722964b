"""The first line of ``run``, and the first screen of tables."""

from __future__ import annotations

import csv
import json
from typing import Any

import pytest
from rich.table import Table

from schedbench.cli.page import markdown, screenful
from schedbench.cli.result_page import FEW, csv_of, page
from schedbench.cli.source_lines import worth_tables
from schedbench.profiles.record.conclusion import conclusion
from tests.cli.pages import SAMPLE
from tests.conftest import RunCommand

SECOND = ["summary", "workload, tokens", "copies by source line", "where the GPU waited"]


@pytest.fixture
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SAMPLE.read_text())
    return found


def test_the_conclusion_has_throughput_idle_time_its_cause_and_a_line(document: dict[str, Any]) -> None:
    assert conclusion(document) == (
        "18,235 output tokens/s (emulated h200); GPU idle 2.7 % of a step (94.1 µs) between forwards, half of it "
        "exposed host work; most exposed wait: sched/relay/lengths.py:41, 0.5 blocking downloads per decode step."
    )
    hidden = document["syncs"][0] | {
        "call": "cudaStreamWaitEvent",
        "sync": False,
        "count": 1_400,
        "host_us": 0.0,
    }
    received = hidden | {"call": "receive proxy", "count": 70, "host_us": 9e9, "exposed_us": 9e9}
    document["syncs"] = [hidden, received]
    assert conclusion(document).endswith("wait: sched/loop/settle.py:88, 0.1 waits per decode step.")


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ({"host": "measured"}, "emulated h200, host time measured"),
        ({"acceptance": "simulated"}, "emulated h200, acceptance of drafts simulated"),
        ({"emulated": False, "host": "measured"}, "measured h200"),
        ({"emulated": False, "host": "measured", "profiled": True}, "profiled h200"),
    ],
)
def test_the_first_sentence_says_what_kind_of_numbers_it_has(
    document: dict[str, Any], label: dict[str, Any], said: str
) -> None:
    document["labels"] |= label
    assert conclusion(document).startswith(f"18,235 output tokens/s ({said}); ")
    document["metrics"]["output_throughput"] = {"abstained": "none were finished"}
    assert conclusion(document).startswith("GPU idle ") and f"({said}); most" in conclusion(document)
    rows = csv.DictReader(csv_of([document]).splitlines())
    assert {row["label"] for row in rows} == {said.replace(" h200", "")}


def test_of_several_passes_the_median_is_shown(document: dict[str, Any]) -> None:
    for name in ("output_throughput", "ttft_ms"):
        document["metrics"][name]["values"] = [2000.0, 4000.0, 30000.0, 5000.0]
    assert conclusion(document).startswith("4,500 output tokens/s (emulated h200); ")
    rows = markdown(page(document, 120)).splitlines()
    assert any(row.startswith("| output throughput | tokens/s | 4,500 | median of 4 |") for row in rows)
    [ttft] = [row for row in rows if row.startswith("| TTFT |")]
    assert ttft.split(" | ")[2] == "4,500"
    [row] = [row for row in csv_of([document]).splitlines() if ",output_throughput," in row]
    assert ",4500" in row


def test_the_conclusion_begins_with_undeclared_hazards(document: dict[str, Any]) -> None:
    document["hazards"] = {"findings": [{"resource": "lens", "missing": "the copy must come first"}]}
    assert conclusion(document).startswith(
        "1 undeclared hazard: lens: the copy must come first; 18,235 output"
    )


def test_time_without_work_is_not_idle_time(document: dict[str, Any]) -> None:
    idle = document["idle"]
    idle["no_work_us"] = sum(idle[f"{part}_us"] for part in ("host_late", "dependency", "kernel_gap"))
    document["metrics"]["exposed_host_us_per_step"]["values"] = [25.75]
    document["metrics"]["exposed_stall_us_per_step"]["values"] = [10.1]
    assert "GPU idle 1.4 % of a step (47 µs)" in conclusion(document)
    document["metrics"] = {name: {"abstained": "no time"} for name in document["metrics"]}
    document["idle"] = {"abstained": "times mean nothing here"}
    assert " 740 steps; no times: times mean nothing here; most exposed wait" in conclusion(document)
    document["ranks"] = [{"per_step": document["per_step"]}] * 2
    assert " 1,480 steps of 2 ranks; no times: times mean nothing here" in conclusion(document)


def test_a_cancelled_run_says_how_many_requests_had_finished_and_has_one_table(
    document: dict[str, Any],
) -> None:
    document["run"]["cancelled"] = True
    assert conclusion(document) == "interrupted when 1 requests had finished."
    document["scenario"]["expanded"]["workload"] = {"requests": 2000}
    assert conclusion(document) == "interrupted when 1 of 2,000 requests had finished."
    document["environment"]["passes"] = {"timed": 2}
    assert conclusion(document) == (
        "interrupted when 1 of 2,000 requests of pass 3 had finished; metrics are of the passes before it."
    )
    document["scenario"]["expanded"]["workload"] = {"requests": len(document["requests"])}
    assert conclusion(document) == "interrupted after pass 2."
    [table] = [block for block in screenful(page(document, 80, lines=FEW)).blocks if isinstance(block, Table)]
    assert table.title == "where the host waited"


def test_a_run_that_broke_off_says_why_and_has_all_tables(document: dict[str, Any]) -> None:
    document["run"]["failure"] = "stage 1 was killed; stage 0 waited"
    assert page(document, 80, lines=FEW).rest == ()
    assert conclusion(document) == "broke off: stage 1 was killed; 1 requests finished."


def test_the_conclusion_says_how_many_requests_failed(document: dict[str, Any]) -> None:
    document["requests"].append({"id": "r1", "status": "failed", "reason": "no KV came"})
    assert conclusion(document).startswith(
        "1 of 3 requests failed, the first: no KV came; 18,235 output tokens/s (emulated h200); "
    )


def test_an_interrupted_search_says_how_much_was_asked(document: dict[str, Any]) -> None:
    document["worth"], document["run"]["further_cancelled"] = {"rows": []}, True
    assert "interrupted when 0 of the lines and phases had been asked" in conclusion(document)
    [gains] = worth_tables(document, lines=1)
    assert gains.caption == "none was asked"


def test_the_conclusion_names_the_worth_where_it_is_computed(document: dict[str, Any]) -> None:
    site = next(row["site"] for row in document["copies"] if row["site"])
    row = {"site": site, "hidden": False, "what": "launch", "output_throughput_pct": 0.84}
    document["worth"] = {"rows": [row]}
    place = f"{site['file']}:{site['line']}"
    assert f"costliest line: {place}, " in conclusion(document)
    assert conclusion(document).endswith("worth 0.84 % of throughput in this scenario.")
    document["worth"] = {"rows": [row | {"hidden": True}]}
    assert conclusion(document).endswith("; no line is worth 0.1 % of throughput in this scenario.")
    document["worth"] = {"rows": [row | {"output_throughput_pct": 0.0045}]}
    assert conclusion(document).endswith(f"in this scenario; the largest gain is 0.0045 %, of {place}.")


def test_a_run_in_which_no_request_finished_says_why(document: dict[str, Any]) -> None:
    document["requests"] = [
        {"id": f"r{number}", "status": "refused", "reason": "9 tokens exceed the KV pool"}
        for number in range(3)
    ]
    assert conclusion(document) == "no request finished: 3 refused; the first: 9 tokens exceed the KV pool."


def test_one_screen_of_tables_and_the_names_of_the_rest(document: dict[str, Any]) -> None:
    few = screenful(page(document, 80, lines=FEW))
    titles = [str(block.title) for block in few.blocks if hasattr(block, "columns")]
    assert titles == ["latency, ms", "copies & syncs per step", "where the host waited"]
    assert few.conclusion == conclusion(document)
    assert f"--all also shows: {', '.join(SECOND)}" in str(few.blocks)
    everything = page(document, 80)
    assert set(SECOND) < {str(getattr(block, "title", "")) for block in everything.blocks}


def test_markdown_begins_with_the_conclusion_and_folds_the_rest(document: dict[str, Any]) -> None:
    text = markdown(page(document, 160))
    assert text.startswith(f"**{conclusion(document)}**\n")
    for title in SECOND:
        assert f"<details><summary>{title}</summary>" in text


def test_run_prints_the_conclusion_and_json_includes_it(run_command: RunCommand) -> None:
    tiny = ("mixed", "--set=workload.requests=2", "--set=device.values=none", "--device=vgpu")
    plain, whole = (run_command("run", *tiny, *more).out for more in ((), ("--all",)))
    said = json.loads(run_command("run", *tiny, "--format=json").out)["conclusion"]
    assert " ".join(plain.split()).startswith(said)
    assert "\nsummary" not in plain and "--all also shows: summary" in plain
    assert "\nsummary" in whole and "--all also shows" not in whole


def test_embeddings_are_not_counted_as_output_tokens(document: dict[str, Any]) -> None:
    document["scenario"]["expanded"]["engine"] = {"embedding": True}
    each = document["metrics"]["request_throughput"]["values"][0]
    assert conclusion(document).startswith(f"{each:.3g} embeddings/s (emulated h200); ")
