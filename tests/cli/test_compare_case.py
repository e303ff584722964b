"""``schedbench compare CASE``: the case's own sides and metric, and the reported effect beside the found one."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from schedbench.cli.app import app
from schedbench.cli.compare_page import CASE_COLUMNS

CASE = """
name: small
case: {source: "a report", a: overlap=true, b: overlap=false, expect: better, metric: ttft_ms, reported: "sooner"}
model: {preset: tiny-llama, dtype: float32}
device: {values: none}
engine: {relay: pr25945, max_running_requests: 4, kv_tokens: 2048}
workload:
  requests: 3
  arrival: burst
  prompt_tokens: {dist: uniform, min: 16, max: 60}
  output_tokens: {dist: uniform, min: 4, max: 9}
"""


@pytest.fixture
def case(tmp_path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(CASE)
    return str(path)


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", *arguments, "--device", "vgpu", "--draws", "0"])


def test_a_case_has_its_sides_and_its_metric(case):
    done = compare(case, "--format", "json")
    found = json.loads(done.stdout)["comparison"]
    assert done.exit_code == 0, done.output
    assert (found["baseline"]["label"], found["candidate"]["label"]) == ("overlap=true", "overlap=false")
    assert (found["headline"], found["verdict"]) == (["ttft_ms"], "better")
    assert found["case"]["reported"] == "sooner"


@pytest.mark.parametrize(
    ("expect", "message"), [("better", "better here, as expected"), ("worse", "better here, expected worse")]
)
def test_the_page_compares_with_the_report(case, expect, message):
    shown = " ".join(compare(case, "--set", f"case.expect={expect}").stdout.split())
    assert f"case of a report: sooner; ttft_ms {message}" in shown


def test_the_page_names_the_loop_and_explains_delta(case):
    shown = " ".join(compare(case, "--seeds", "2").stdout.split())
    assert "A overlap=true (relay pr25945, overlapped" in shown
    assert "B overlap=false (relay pr25945, serial" in shown
    assert "medians over workload seeds, Δ is the median of the changes seed by seed" in shown


def test_sides_on_the_command_line_replace_the_case(case):
    done = compare(case, "--b", "relay=latest", "--seeds", "1", "--format", "json")
    found = json.loads(done.stdout)["comparison"]
    assert found["baseline"]["label"] == "as is"
    assert found["case"] is None
    assert len(found["headline"]) == 3


def test_cases_are_listed_with_what_they_compare():
    listed = CliRunner().invoke(app, ["list", "cases"]).stdout
    paragraph = next(part for part in listed.split("\n\n") if part.startswith("cases/sync-count-null"))
    assert "sglang-omni#564, #572" in paragraph
    assert "  A penalties=upstream, B penalties=exact" in paragraph.splitlines()
    assert "  expect: output_throughput no change" in paragraph.splitlines()
    entries = json.loads(CliRunner().invoke(app, ["list", "cases", "--format", "json"]).stdout)
    assert all(
        {"name", "about", "source", "a", "b", "expect", "metric", "reported"} <= entry.keys()
        for entry in entries
    )


def test_the_library_is_one_table_of_all_cases(monkeypatch):
    monkeypatch.setattr("schedbench.scenarios.shipped.case_names", lambda: ["cases/sync-count-null"])
    done = compare("cases", "--seeds", "1", "--set", "workload.output_tokens=4", "--format", "md")
    assert done.exit_code == 0, done.exception
    said, _, heading, _, row = done.stdout.splitlines()
    assert said == (
        "**0 of 1 reported changes are found as expected; cases/sync-count-null is inconclusive: LOW_N, "
        "expected no change.**"
    )
    assert heading == f"| {' | '.join(CASE_COLUMNS)} |"
    cells = row.strip("| ").split(" | ")
    assert cells[:3] == [
        "`sync-count-null`",
        "sglang-omni#564, #572",
        "`penalties=upstream` → `penalties=exact`",
    ]
    assert cells[4:6] == ["output_throughput no change", "**inconclusive: LOW_N**"] and cells[-1] == "–"
