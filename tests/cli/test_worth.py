"""``schedbench worth`` and ``run --worth``: counterfactual runs in every format, and the page of docs/worth.md."""

from __future__ import annotations

import csv
import io
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from schedbench.cli import compare_page, ladder_page
from schedbench.cli.page import markdown
from schedbench.cli.pictures import run_charts
from schedbench.cli.result_page import csv_of, page, worth_page_of
from schedbench.cli.source_lines import CHANGES
from schedbench.profiles.record.result import STREAM_WAIT
from tests.cli.pages import SAMPLE
from tests.conftest import RunCommand

pytestmark = pytest.mark.wide

DOCS = Path(__file__).parents[2] / "docs"
CASE = ("cases/h2d-blocking-output-ids", "--relay", "pr25945", "--set", "workload.output_tokens=24")
UPLOAD = "sched/relay/penalties.py"


def blocks(name: str) -> list[str]:
    """Returns the fenced blocks of a page of the docs."""
    return (DOCS / name).read_text().split("```\n")[1::2]


def wherever(text: str) -> str:
    """The text without line numbers, which change, and without spaces at ends of lines."""
    return "\n".join(line.rstrip() for line in re.sub(r"\.py:\d+ *", ".py ", text).splitlines())


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worth")


@pytest.fixture
def document(run_command: RunCommand, kept: Path) -> dict[str, Any]:
    """The result of one run of the command, which all tests share."""
    if not (kept / "result.json").exists():
        done = run_command("worth", *CASE, "--rooms", "1", "--output-dir", kept, "--format", "json")
        assert done.code == 0, done.err
        assert json.loads(done.out) == json.loads((kept / "result.json").read_text())
    found: dict[str, Any] = json.loads((kept / "result.json").read_text())
    return found


def test_rows_are_sorted_by_gain_and_hidden_ones_last(document: dict[str, Any]) -> None:
    rows = document["worth"]["rows"]
    assert rows[0]["site"]["file"] == UPLOAD
    hidden = [row["hidden"] for row in rows]
    assert hidden == sorted(hidden) and any(hidden)
    shown = [row for row in rows if not row["hidden"] and not row["abstained"]]
    gains = [(row.get("needed", False), -row["output_throughput_pct"]) for row in shown]
    assert gains == sorted(gains)
    [barrier] = [row for row in shown if row.get("needed")]
    assert barrier["what"] == STREAM_WAIT and barrier["output_throughput_pct"] > 2
    assert sum(row["room_us"] is not None for row in rows) == 1
    assert {row["change"] for row in rows} == {"absent", "no wait", "pinned", "half"}
    drawn = {point["series"] for point in [*run_charts(document)][-1].points}
    assert {"is not there", "does not wait"} <= drawn <= set(CHANGES.values())


def test_the_conclusion_names_the_line_and_its_worth(document: dict[str, Any]) -> None:
    gain = document["worth"]["rows"][0]["output_throughput_pct"]
    assert f"costliest line: {UPLOAD}:" in document["conclusion"]
    said = f"one blocking upload per decode step, worth {gain:.2g} % of throughput in this scenario."
    assert document["conclusion"].endswith(said)


def test_a_hidden_line_without_a_limit_names_the_option_that_finds_it(document: dict[str, Any]) -> None:
    hidden = [row for row in document["worth"]["rows"] if row["hidden"]]
    assert f"; –: --rooms {len(hidden)} finds" in markdown(worth_page_of(document))
    for row in hidden:
        row["room_us"] = [1.0, 2.0]
    assert "; –: --rooms" not in markdown(worth_page_of(document))


def test_the_first_screenful_has_the_hidden_lines_whose_room_was_searched_for(
    document: dict[str, Any],
) -> None:
    hidden = [row for row in document["worth"]["rows"] if row["hidden"]]
    for number, row in enumerate(hidden):
        row["room_us"] = [1.0, 2.0] if number < 5 else None
    few = markdown(worth_page_of(document, few=True))
    assert f"; and {len(hidden) - 5} more with --all" in few and few.count("1 … 2") == 5
    assert "with --all" not in markdown(worth_page_of(document))


def test_every_format_has_the_rows(document: dict[str, Any]) -> None:
    [first, *_] = document["worth"]["rows"]
    [chart] = [chart for chart in run_charts(document) if chart.title == "what would it be worth"]
    assert [point["x"] for point in chart.points] == [
        row["output_throughput_pct"] for row in document["worth"]["rows"] if row["output_throughput_pct"]
    ][:12]
    text = markdown(worth_page_of(document))
    assert text.startswith(f"**{document['conclusion']}**")
    assert any(line.startswith(f"| `{UPLOAD}:") and "is not there" in line for line in text.splitlines())
    rows = list(csv.DictReader(io.StringIO(csv_of([document], only="worth."))))
    place = f"{UPLOAD}:{first['site']['line']}"
    [row] = [row for row in rows if row["metric"] == f"worth.{place}.{first['change']}.tpot_ms"]
    assert float(row["value"]) == first["tpot_ms"] and row["unit"] == "ms"
    assert all(row["metric"].startswith("worth.") for row in rows)


def test_the_waits_of_run_have_their_worth_beside_their_exposed_time(document: dict[str, Any]) -> None:
    whole = page(document, 120)
    [waits] = [table for table in whole.blocks if str(getattr(table, "title", "")) == "where the host waited"]
    headings = [str(column.header) for column in waits.columns]  # type: ignore[union-attr]
    assert headings[2:] == ["hidden\nµs/step", "exposed\nµs/step", "worth\nµs/step"]
    exposed, worth = (float(next(iter(waits.columns[k].cells))) for k in (3, 4))  # type: ignore[union-attr, arg-type]
    assert exposed < 10 and 85 < worth < 110


def test_the_docs_show_the_page(
    document: dict[str, Any], run_command: RunCommand, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert document["worth"]
    monkeypatch.setenv("COLUMNS", "100")
    shown = wherever(run_command("report", kept / "result.json", "--all").out)
    for block in blocks("worth.md"):
        assert wherever(block) in shown


SHORT = ("--set", "workload.output_tokens=24", "--device=vgpu", "--worth")


def test_compare_shows_the_worth_of_differing_lines(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = (*SHORT, "--seeds=1", "--draws=0")
    sides = ("penalties=upstream", "penalties=exact")
    both = {
        order: json.loads(
            run_command("compare", CASE[0], *few, "--a", order[0], "--b", order[1], "--format=json").out
        )
        for order in (sides, sides[::-1])
    }
    worth = {}
    for order, document in both.items():
        asked = [line for line in document["comparison"]["lines"] if line["a"] != line["b"]]
        assert {line["site"]["file"] for line in asked} == {UPLOAD}
        [worth[order]] = {line["worth_pct"] for line in asked}
        assert all(line["worth_pct"] is None for line in document["comparison"]["lines"] if line not in asked)
        change = document["comparison"]["metrics"]["output_throughput"]["delta_pct"]
        assert f"; of the {change:+.2f} %, {worth[order]:+.2f} come from {UPLOAD}:" in document["conclusion"]
        assert 0.8 < worth[order] / change < 1
    there, back = worth.values()
    assert there > 1 and (1 + there / 100) * (1 + back / 100) == pytest.approx(1)
    monkeypatch.setenv("COLUMNS", "120")
    page = markdown(compare_page.page(both[sides], 120))
    assert "| A | B | Δ | worth % |" in page and f"| -1 | +{there:.2f} |" in page
    assert "| A | B | worth % |" in page  # where the host's wait was exposed


def test_the_ladder_shows_the_worth_for_each_state(run_command: RunCommand) -> None:
    states = "[{state: pr25945, penalties: upstream}, {state: pr25945, penalties: exact}]"
    done = run_command("run", CASE[0], *SHORT, "--set", f"engine.relays={states}", "--format=json")
    document = json.loads(done.out)
    first, second = document["rungs"]
    assert first["lines"] == [] and {line["site"]["file"] for line in second["lines"]} == {UPLOAD}
    [worth] = {line["worth_pct"] for line in second["lines"]}
    assert f"(of which {worth:+.2f} come from {UPLOAD}:" in document["conclusion"]
    [table] = [
        block
        for block in ladder_page.page(document).blocks
        if "are worth" in str(getattr(block, "title", ""))
    ]
    assert [*table.columns[2].cells] == [f"{worth:+.2f}"]  # type: ignore[union-attr]


def test_stored_results_have_no_counterfactual_runs(run_command: RunCommand) -> None:
    done = run_command("compare", SAMPLE, SAMPLE, "--worth")
    assert (done.code, done.out) == (2, "") and "worth: stored results cannot be run again" in done.err


def test_hazards_are_watched_in_the_run_as_it_is(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watching changes no time, so that the counterfactual runs, which are not watched, differ by what they change."""
    monkeypatch.setattr("schedbench.profiles.worth.worth.spread", lambda *_: nullcontext(map))
    monkeypatch.setattr("schedbench.profiles.worth.worth.source_lines", lambda *_: [])
    tiny = ("--set", "requests=1", "--set", "output_tokens=2", "--set", "values=none", "--format", "json")
    alone, watched = (
        json.loads(run_command("run", "mixed", "--worth", "--hazards", on, *tiny).out) for on in ("off", "on")
    )
    assert watched["worth"] == alone["worth"] and watched["metrics"] == alone["metrics"]
    assert watched["hazards"]["findings"] == [] and "abstained" in alone["hazards"]
