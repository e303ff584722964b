"""``schedbench explain`` describes every metric and counter of a result."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Final, get_args

import pytest

from schedbench.profiles.judge.compare import Overall
from schedbench.profiles.judge.gates import Passed
from schedbench.profiles.judge.reasons import Reason
from schedbench.profiles.record.definitions import IDLE_NAMES, KINDS, definition
from tests.conftest import RunCommand

CHECKS: Final = Path(__file__).parents[2] / "docs" / "check.md"
SMALL = (
    *("--set", "workload.requests=2"),
    *("--set", "workload.output_tokens={dist: uniform, min: 4, max: 8}"),
)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        *((name, "") for name in ("send", "memset", "bubble_pct.mb0", "bubble_pct.outside", "d2h_blocking")),
        *(("expect.decode.steady", ""), ("forward_ms.decode.p50", "ms, "), ("hidden", "us/step, ")),
    ],
)
def test_names_of_results_are_explained_with_the_units_of_the_tables(
    run_command: RunCommand, name: str, unit: str
) -> None:
    found = run_command("explain", name)
    assert found.code == 0 and found.out.startswith(f"{name}  [{unit}")


@pytest.mark.parametrize("scenario", ["pp2", "disagg", "spec_v2", "hisparse"])
def test_every_name_of_a_result_has_a_definition(run_command: RunCommand, scenario: str) -> None:
    rows = list(csv.DictReader(io.StringIO(run_command("run", scenario, *SMALL, "--format", "csv").out)))
    assert len(rows) > 20 and all(definition(row["metric"]).name for row in rows)


def test_the_idle_time_of_each_rank_is_in_a_table(run_command: RunCommand) -> None:
    found = run_command("run", "pp2", *SMALL)
    assert any(line.split()[:2] == ["idle", "ms"] for line in found.out.splitlines())


def test_a_key_is_explained_by_its_fields(run_command: RunCommand) -> None:
    (entry,) = json.loads(run_command("explain", "prompt_tokens.max", "--format", "json").out)
    assert entry["about"] == "The largest length, included."


def test_the_words_of_pages_are_explained(run_command: RunCommand) -> None:
    table, _ = CHECKS.read_text().split("\n\n`--device cuda`")
    checks = re.findall(r"(?m)^\| (\w+) \|", table)[1:]
    assert {"run", "tokens", "adversary"} < set(checks)
    words = (
        *IDLE_NAMES.values(),
        *get_args(Overall),
        *get_args(Passed)[2:],
        *KINDS,
        *checks,
        "TTFT",
        "worst_step",
    )
    for word in words:
        found = run_command("explain", word)
        assert found.code == 0 and len(found.out.split("\n\n")) > 1, (word, found.err)


def test_every_reason_for_no_verdict_is_explained(run_command: RunCommand) -> None:
    for reason in Reason:
        found = run_command("explain", reason)
        assert found.code == 0 and found.out.startswith(f"{reason}\n\n") and found.out.rstrip().endswith(".")
