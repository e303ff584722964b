"""Whole rendered pages of one fixed result, and cells that must never be truncated."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from schedbench.cli.console import PIPED_WIDTH, PrintableConsole, results
from schedbench.cli.page import folded_paths, framed, markdown, markdown_rows
from schedbench.cli.result_page import page as result_page
from schedbench.cli.source_lines import copies, host_waits, source_line
from schedbench.cli.text import cut_left, cut_right, number, percent, size, whole
from schedbench.profiles.measure.budget import breaches
from schedbench.profiles.record.result import read
from tests.cli.pages import SAMPLE, printed

HERE = Path(__file__).parent
BUDGET = {"decode": {"schedule": {"d2h": 0}}, "mixed": {"copy": {"sync": 0}}}


def page(document, *, width, broken=()) -> str:
    text = printed(result_page(document, width, breaches=broken), width)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


@pytest.fixture
def document() -> dict:
    return json.loads(SAMPLE.read_text())


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_equals_the_stored_text(document, width):
    broken = breaches(BUDGET, read(SAMPLE))
    assert page(document, width=width, broken=broken) == (HERE / "golden" / f"result_{width}.txt").read_text()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_no_line_is_wider_than_the_page_and_nothing_is_coloured(document, width):
    text = page(document, width=width, broken=breaches(BUDGET, read(SAMPLE)))
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text


def test_large_numbers_are_never_truncated(document):
    for row in document["copies"]:
        row["count"], row["bytes"] = 98_765_432, 2**50
    text = page(document, width=80)
    copied, waited = text.split("where the host waited")
    assert (copied.count("98,765,432"), waited.count("98,765,432")) == (len(document["copies"]), 1)
    assert text.count("1,024 TiB") == len(document["copies"])


def test_a_long_path_is_folded_and_not_cut(document):
    document["copies"][0]["site"]["file"] = path = "some/very/deep/folder/of/a/relay/file/lengths.py"
    rows = page(document, width=80).split("copies by source line")[1].splitlines()
    assert path in "".join(row[:30].strip() for row in rows)


@pytest.mark.parametrize(("lines", "shown"), [(None, "a = f(b,\nc) + g(d,\ne)"), (2, "a = f(b,\nc) + g(d,…")])
def test_a_statement_is_cut_at_as_many_lines_as_the_console_shows(lines, shown):
    console = PrintableConsole(file=io.StringIO(), width=10)
    console.statement_lines = lines
    site = {"file": "some/folder/a.py", "line": 1, "statement": "a = f(b, c) + g(d, e)"}
    table = framed("")
    table.add_column("place", overflow="fold")
    table.add_row(source_line({"site": site}))
    console.print(table)
    assert console.file.getvalue().endswith(f"──\nsome/\nfolder/\na.py:1\n{shown}\n")


def test_an_abstained_figure_is_a_dash_with_its_reason(document):
    document["metrics"] = {name: {"value": None, "abstained": "no time"} for name in document["metrics"]}
    document["idle"] = {"value": None, "abstained": "no whole forward was seen"}
    document["outputs"] = {"value": None, "abstained": "interrupted"}
    text = page(document, width=80)
    assert "tokens – interrupted" in text
    words = [line.split() for line in text.splitlines()]
    assert ["gpu", "busy", "–", "no", "time"] in words
    assert ["forward", "idle", "–", "–"] in words


def test_labels_mark_partial_and_profiled_runs(document):
    document["labels"] |= {"emulated": False, "profiled": True, "host": "measured"}
    document["run"]["cancelled"] = True
    text = page(document, width=120)
    assert "profiled h200 · relay pr25945 · not for timing" in text
    assert "cancelled: partial" in text


def test_an_empty_result_has_a_page(document):
    document |= {"copies": [], "syncs": [], "per_step": {}, "requests": [], "metrics": {}}
    document["idle"] = dict.fromkeys(document["idle"], 0.0)
    text = page(document, width=80)
    assert "0 requests: none" in text
    assert "\n\nwhere the host waited: no step was recorded\n" in text
    assert "\n\ncopies by source line: no step was recorded\n" in text
    assert "**where the host waited**: no step was recorded\n" in markdown(result_page(document, 160))
    document["per_step"] = {"decode": {"steps": 1}}
    assert "\n\nwhere the host waited: none\n" in page(document, width=80)


def test_a_kind_of_step_that_ends_within_others_has_no_share_of_the_critical_path(document):
    parts = {"launches": 300, "kernels": 100}
    document["critical_path"] = {
        "draft": {"steps": 2, "total_ns": 0, "parts_ns": {}},
        "verify": {"steps": 2, "total_ns": 400, "parts_ns": parts},
    }
    assert [
        row.split()
        for row in page(document, width=80).splitlines()
        if row.startswith(("launches", "kernels"))
    ] == [
        ["launches", "0", "75.0"],
        ["kernels", "0", "25.0"],
    ]


def test_only_the_most_expensive_lines_are_shown_and_the_others_counted(document):
    document["copies"] = [
        {**row, "site": {**row["site"], "line": line}}
        for line in range(1, 15)
        for row in document["copies"]
        if row["site"]
    ]
    shown = copies(document)
    assert shown.caption == f"and {len(document['copies']) - shown.row_count} more lines"


def test_kinds_of_steps_share_a_row(document):
    row = document["copies"][0]
    document["copies"] = [row | {"kind": "decode", "count": 3}, row | {"kind": "prefill", "count": 4}]
    assert copies(document).row_count == 1
    assert "prefill, decode" in page(document, width=120)


def test_rows_of_one_line_in_two_ranges_name_their_range(document):
    row = document["copies"][0]
    document["copies"] = [row | {"range": "prepare"}, row | {"range": "settle"}]
    whats = list(copies(document).columns[1].cells)
    assert len({str(what) for what in whats}) == 2


def test_launch_latency_and_unnamed_work_are_shown_where_recorded(document):
    document["idle"] |= {"launch_latency_us": 5200.5, "unnamed_host_us": 1300.125}
    words = [line.split() for line in page(document, width=80).splitlines()]
    assert ["launch", "latency", "6.50", "6.9"] in words
    assert ["outside", "any", "range", "1.63", "1.7"] in words


def test_a_workload_that_differs_from_the_requested_one_is_noted(document):
    assert "clipped" not in page(document, width=80)
    document["scenario"]["expanded"]["workload"] = {"requests": 100}
    document["workload"] |= {"clipped": 3, "left_out": 5}
    text = page(document, width=160)
    assert "2 requests: 1 finished, 1 refused; the trace has 2 of 100; " in text
    assert "5 records without prompt or output left out; 3 clipped to the context" in text
    words = [line.split() for line in page(document, width=80).splitlines()]
    assert ["prompt", "requested", "358", "358", "665.8"] in words
    assert ["prompt", "achieved", "4,550", "4,550", "8,555"] in words
    assert ["output", "achieved", "16", "16", "30.4"] in words
    assert not any(line[:2] == ["output", "requested"] for line in words)


def test_forward_times_are_shown_by_kind_with_their_gaps(document):
    text = page(document, width=80)
    assert "forward decode" in text
    total, inside = text.index("forward idle  "), text.index("inside forwards")
    assert total < inside


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0, "0"),
        (None, "–"),
        (12, "12"),
        (1234567, "1,234,567"),
        (1234.56, "1,235"),
        (254.25, "254.2"),
        (12.5, "12.5"),
        (2.875, "2.88"),
        (0.25, "0.250"),
        (0.0004, "<0.001"),
        (-0.0004, ">-0.001"),
        (-3.0, "-3.00"),
    ],
)
def test_numbers_are_formatted(value, text):
    assert number(value) == text


def test_shares_and_sizes_are_formatted():
    assert (percent(0), percent(None), percent(0.9731), percent(1.0)) == ("0", "–", "97.3", "100.0")
    assert (size(0), size(1023), size(1024), size(3 * 2**30)) == ("0 B", "1023 B", "1.00 KiB", "3.00 GiB")
    assert (whole(3.0), whole(3.5), type(whole(3.0))) == (3, 3.5, int)


@given(st.text(min_size=1), st.integers(2, 50))
def test_truncated_text_fits_the_width(text, width):
    assert len(cut_left(text, width)) == len(cut_right(text, width)) == min(len(text), width)


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e15, max_value=1e15))
def test_a_formatted_number_is_close_to_its_value(value):
    text = number(value)
    if "<" not in text and ">" not in text:
        assert float(text.replace(",", "")) == pytest.approx(value, rel=0.01, abs=0.002)


def test_markdown_has_code_verbatim_and_keeps_indents(document):
    """As GitHub renders it, a statement has no emphasis, and spaces before a cell are no markup."""
    document["copies"][0]["site"]["statement"] = "a[*b, __c__] | d"
    text = markdown(result_page(document, 160))
    assert "`<br>`a[*b, __c__] \\| d` | " in text
    assert "| &nbsp;&nbsp;exposed stall | " in text
    table = framed("", "source line", "what")
    table.add_row("x = f`y`", "in <lambda>")
    assert markdown_rows(table)[-1] == "| `` x = f`y` `` | in &lt;lambda> |"


def test_a_pipe_is_wide_and_plain_by_default(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    console = results()
    assert (console.is_terminal, console.width) == (False, PIPED_WIDTH)
    console.print("[bold]12[/bold]")
    assert capsys.readouterr().out == "12\n"
    monkeypatch.setenv("COLUMNS", "70")
    assert results().width == 70


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert results().no_color


def of_workers(document, role="decode"):
    """Returns the document as one of two equal workers."""
    forwards = {"forward_ms.decode": document["metrics"]["forward_ms.decode"]}
    rank = {"role": role, "metrics": forwards, "idle": document["idle"], "per_step": document["per_step"]}
    document["ranks"] = [rank | {"name": f"{role} {index}"} for index in (0, 1)]
    return document


def exposed(document) -> float:
    return float(next(iter(host_waits(document).columns[4].cells)))


@pytest.mark.parametrize("role", ["decode", "pipeline"])
def test_host_waits_are_per_step_of_all_ranks(document, role):
    alone = exposed(document)
    assert exposed(of_workers(document, role)) == pytest.approx(alone / 2, rel=0.01)


def test_host_waits_are_per_step_that_ran_a_forward_with_its_drafts(document):
    alone, (forward, counts) = exposed(document), (document["metrics"]["forward_ms.decode"], {"steps": 700})
    document["metrics"] |= {"forward_ms.draft": forward, "forward_ms.draft_extend": forward}
    document["per_step"] |= dict.fromkeys(("draft", "draft_extend", "prebuilt"), counts)
    assert exposed(document) == alone


@pytest.mark.parametrize("most", [2, 98_765])
def test_sends_are_counted_and_untruncated_on_a_narrow_page(document, most):
    """Also where several counts of a kind and stream need two numbers."""
    sent = {"median": 1.0, "mean": 1.0, "max": 2, "steps_with": 700}
    for kind in document["per_step"].values():
        kind["link"] = {"send": sent}
        kind["copy"] = dict.fromkeys(("h2d", "d2h", "d2d", "sync"), sent | {"median": 1.5, "max": most})
    text = page(of_workers(document), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("1.50 /") == 4 * len(document["per_step"])
    assert text.count(number(most)) >= 4 * len(document["per_step"])
    assert "  send\n" in text
    assert ["link", "0", "0", "0", "0", "0", "1", "/", "2"] in [line.split() for line in text.splitlines()]
    table = text[text.index("copies & syncs") : text.index("copies by source")]
    assert "decode.steady" in table
    assert "…" not in table
    assert "the first rank that had any: decode 0 (mixed, decode, decode.steady)" in " ".join(table.split())
    stepless = page(of_workers(document) | {"per_step": {}, "critical_path": {}}, width=80)
    assert "that had any" not in " ".join(stepless.split())


def test_the_summary_of_a_run_without_times_has_acceptance_only(document):
    why = {"value": None, "abstained": "no clock"}
    document["metrics"] = {"ttft_ms": why, "gpu_busy": why, "accept_length": document["metrics"]["gpu_busy"]}
    document["idle"] = why
    text = page(document, width=80)
    assert "accept length" in text
    assert "gpu busy" not in text
    assert "\nnone\n" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_many_ranks_are_split_into_tables_without_truncation(document, width):
    rank = of_workers(document)["ranks"][0] | {"metrics": {"gpu_busy": document["metrics"]["gpu_busy"]}}
    document["ranks"] = [rank | {"name": f"replica {index}"} for index in range(20)]
    text = page(document, width=width)
    by_rank = text[text.index("by rank, 1 to ") :]
    assert max(map(len, by_rank.splitlines())) <= width
    assert "…" not in by_rank
    assert " to 20 of 20" in by_rank
    found = [line.split()[3:] for line in by_rank.splitlines() if line.startswith("gpu busy")]
    assert len([figure for figures in found for figure in figures]) == 20


def test_a_ranks_metrics_are_labelled_by_their_variants(document):
    names = ("forward_ms.decode", "bubble_pct.mb0", "bubble_pct.outside", "hisparse_hit_ratio")
    metrics = dict.fromkeys(names, document["metrics"]["gpu_busy"])
    document["ranks"] = [of_workers(document)["ranks"][0] | {"metrics": metrics}]
    text = page(document, width=120)
    labels = ("forward ms: decode", "bubble: before mb0", "bubble: before other work", "hisparse hit ratio")
    assert all(f"\n{label}  " in text for label in labels)


@pytest.mark.parametrize(
    ("line", "folded"),
    [
        ("at ab/cdefgh.py:12 it", "at ab/\ncdefgh.py:12 it"),
        ("ab/cd/efghijklm.py:1", "ab/cd/\nefghijklm.py:1"),
        ("abcdefghijklmnop", "abcdefghijklmnop"),
        ("a short/a.py:1", "a short/a.py:1"),
    ],
)
def test_a_path_that_is_too_wide_breaks_behind_a_slash(line: str, folded: str) -> None:
    assert folded_paths(Text(line), 14).plain == folded
