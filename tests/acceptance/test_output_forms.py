"""One result in every format, each valid in itself."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from schedbench.cli.console import PIPED_WIDTH
from schedbench.profiles.record.result import Metric, Outputs, Result
from tests.conftest import RunCommand

FEW = (
    "workload.requests=4",
    "workload.output_tokens.max=16",
    "measure.warmup_requests=0",
    "device.values=none",
)
BRIEF = ("run", "mixed", *(word for override in FEW for word in ("--set", override)))
COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38;)[0-9;]*m")


Printed = Callable[..., str]


@pytest.fixture(scope="module")
def outputs() -> dict[tuple[str, ...], str]:
    """Outputs that were printed before, by format."""
    return {}


@pytest.fixture
def printed(
    run_command: RunCommand, outputs: dict[tuple[str, ...], str], monkeypatch: pytest.MonkeyPatch
) -> Printed:
    monkeypatch.delenv("COLUMNS", raising=False)  # the processes of pytest-xdist have it

    def form(*how: str) -> str:
        if how not in outputs:
            said = run_command(*BRIEF, "--format", *how)
            assert (said.code, said.err) == (0, "")
            outputs[how] = said.out
        return outputs[how]

    return form


def test_table_fits_a_page(printed: Printed) -> None:
    lines = printed("table").splitlines()
    assert "output tokens/s (emulated h200); GPU idle " in lines[0]
    assert any(line.startswith("mixed  Chunked prefill mixed with running decodes") for line in lines[1:4])
    assert "4 requests: 4 finished" in lines
    assert len(lines) <= 50
    assert max(map(len, lines)) <= PIPED_WIDTH


def test_json_is_a_result(printed: Printed) -> None:
    out = printed("json", "--save-tokens")
    result = Result.from_json(out)
    assert result.to_json() == out
    assert all(len(row.token_ids or ()) == row.output_tokens for row in result.requests)
    assert "token_ids" not in json.loads(printed("json"))["requests"][0]


def test_json_has_the_drawn_workload(printed: Printed) -> None:
    result = Result.from_json(printed("json"))
    drawn = [row.prompt_tokens for row in result.requests]
    assert (result.workload.requests, result.workload.clipped) == (4, 0)
    assert result.workload.prompt_tokens.achieved.mean == sum(drawn) / len(drawn)
    assert result.workload.prompt_tokens.requested is not None


def test_csv_rows_name_the_run_and_the_metric(printed: Printed) -> None:
    rows = list(csv.DictReader(io.StringIO(printed("csv"))))
    result = Result.from_json(printed("json"))
    assert isinstance(result.outputs, Outputs)
    which = {tuple(row[name] for name in ("scenario", "relay", "label", "digest")) for row in rows}
    assert which == {("mixed", result.relay.state, "emulated", result.outputs.digest)}
    by_name = {row["metric"]: row for row in rows}
    assert len(by_name) == len(rows)
    assert all(row["abstained"] or float(row["value"]) >= 0 for row in rows)
    latency = by_name["itl_ms"]
    assert float(latency["p50"]) <= float(latency["p90"]) <= float(latency["max"])
    count = by_name["decode.steady.forward.d2h"]
    expected = result.per_step["decode.steady"].streams["forward"]["d2h"]
    assert {
        name: float(count[name]) for name in ("median", "mean", "max", "steps_with")
    } == expected.model_dump()
    assert by_name["output_throughput"]["steps_with"] == ""


@pytest.mark.parametrize("scenario", ["pp2", "disagg", "dp_idle"])
def test_csv_has_rows_of_every_rank(run_command: RunCommand, tmp_path: Path, scenario: str) -> None:
    knobs = ("workload.requests=4", "workload.output_tokens=4", "device.values=none")
    small = [word for knob in knobs for word in ("--set", knob)]
    said = run_command("run", scenario, *small, "--format", "csv", "--output-dir", tmp_path)
    assert (said.code, said.err) == (0, "")
    result = Result.from_json((tmp_path / "result.json").read_text())
    rows = list(csv.DictReader(io.StringIO(said.out)))
    by_place = {(row["rank"], row["role"], row["metric"]): row for row in rows}
    assert len(by_place) == len(rows)
    assert {(rank, role) for rank, role, _ in by_place} == {
        ("", ""),
        *((rank.name, rank.role) for rank in result.ranks),
    }
    assert {metric for name, _, metric in by_place if not name} == result.metrics.keys()
    assert {row.direction for row in result.copies} <= {"h2d", "d2h", "d2d", "kernel"}  # and no sends
    for rank in result.ranks:
        busy = rank.metrics["gpu_busy"]
        assert isinstance(busy, Metric)
        assert float(by_place[rank.name, rank.role, "gpu_busy"]["value"]) == busy.values[0]
        counted = [
            f"{kind}.{stream}.{counter}"
            for kind, counts in rank.per_step.items()
            for stream, counters in counts.streams.items()
            for counter in counters
        ]
        metrics = {metric for name, _, metric in by_place if name == rank.name}
        assert counted and metrics == {*counted, *rank.metrics}


def test_markdown_tables_have_even_columns(printed: Printed) -> None:
    lines = printed("md").splitlines()
    tables = [line.count("|") - line.count("\\|") if line.startswith("|") else 0 for line in lines]
    assert sum(width > 0 for width in tables) > 30
    assert all(width in (0, before) or before == 0 for before, width in pairwise(tables))
    assert sum(set(line) <= set("|-: ") and bool(line) for line in lines) >= 4  # a ruler under each heading


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_budget_is_mentioned_on_stderr_if_it_is_broken(run_command: RunCommand, allowed: int) -> None:
    said = run_command(*BRIEF, "--format", "json", "--expect", f"decode.steady.forward.d2h={allowed}")
    assert said.code == 1 - allowed
    assert said.err == "" if allowed else "d2h" in said.err
    assert Result.from_json(said.out).per_step["decode.steady"].steps > 0


def test_a_broken_budget_is_in_the_conclusion_and_the_last_table(run_command: RunCommand) -> None:
    said = run_command(*BRIEF, "--expect", "decode.steady.forward.d2h=0")
    assert (said.code, said.err) == (1, "")
    assert said.out.startswith("budget broken: decode.steady forward d2h; ")
    assert "decode.steady" in " ".join(said.out.splitlines()[-4:])  # the line may be folded


def test_no_color_keeps_bold_escapes_on_a_terminal(
    printed: Printed, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "result.json").write_text(printed("json"))
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    seen = run_command("report", tmp_path / "result.json").out
    assert "\x1b[" in seen and not COLOUR.search(seen)
