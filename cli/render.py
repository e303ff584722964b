"""A result in the form that was asked for. Tables are made once, in ``tables``; the forms differ in paint."""

from __future__ import annotations

import csv
import html
import io
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from . import hazards, tables

if TYPE_CHECKING:
    from ..profiles.ranks.execute import RunOutcome

Format = Literal["table", "json", "md", "csv", "html"]
WIDE = 160  # columns of a page that nobody's terminal limits

_RUN = ("scenario", "relay", "label", "host", "digest")
_RANK = ("rank", "role")  # empty in rows of the whole run
_FIGURES = (
    *("metric", "unit", "value", "p50", "p90", "p95", "p99"),
    *("median", "mean", "max", "steps_with", "abstained"),
)
_PAGE = """<!DOCTYPE html>
<html>
<head>
<meta charset="UTF-8">
<title>TITLE</title>
<style>
{stylesheet}
body {{ color: {foreground}; background-color: {background}; }}
pre {{ font-family: Menlo, "DejaVu Sans Mono", Consolas, monospace; }}
</style>
</head>
<body>
<pre><code>{code}</code></pre>
</body>
</html>
"""


def show(outcome: RunOutcome, console: Console, form: Format) -> None:
    """Print the outcome on stdout; what was broken goes to stderr where stdout is a document."""
    if form == "table":
        tables.render(outcome.result.document(), console, breaches=outcome.breaches)
    else:
        sys.stdout.write(text(outcome, form))
        if outcome.breaches:
            print(tables.budget(outcome.breaches, width=console.width).plain, file=sys.stderr)
        if outcome.undeclared:
            print(hazards.listed(outcome.result.document()["hazards"]), file=sys.stderr)
    for kind in outcome.untested:
        print(f"expect: no step was of kind {kind}; its budget is untested", file=sys.stderr)


def text(outcome: RunOutcome, form: Format) -> str:
    if form == "json":
        return outcome.result.to_json()
    document = outcome.result.document()
    if form == "csv":
        return csv_of([document])
    return _markdown(document) if form == "md" else _html(outcome, document)


def csv_of(documents: Sequence[dict[str, Any]]) -> str:
    """One row per metric, and per count of a kind and stream, of the run and then of each rank; each says which run it
    is of, so that files of many runs can be put together. ``value`` is a distribution's mean and a count's median."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [*_RUN, *_RANK, *_FIGURES], restval="", lineterminator="\n")
    writer.writeheader()
    for document in documents:
        run = dict(zip(_RUN, _which(document), strict=True))
        writer.writerows(run | row for row in _rows(document))
        for rank in document.get("ranks", ()):
            place = {"rank": rank["name"], "role": rank["role"]}
            writer.writerows(run | place | row for row in _rows(rank))
    return out.getvalue()


def _which(document: dict[str, Any]) -> tuple[str, ...]:
    label, scenario = document["labels"], document["scenario"]["expanded"]
    return (
        str(scenario.get("name", "")),
        document["relay"]["state"],
        "emulated" if label["emulated"] else "measured",
        label["host"],
        document["outputs"].get("digest", ""),
    )


def _rows(told: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Of a document, or of a rank in one."""
    yield from _metric_rows(told)
    yield from _count_rows(told)


def _metric_rows(told: dict[str, Any]) -> Iterator[dict[str, str]]:
    for name, metric in told["metrics"].items():
        values = metric.get("values")
        figures = {figure: metric.get(figure) for figure in ("p50", "p90", "p95", "p99", "max")}
        yield {
            "metric": name,
            "unit": metric.get("unit", ""),
            "value": repr(sum(values) / len(values)) if values else "",
            "abstained": metric.get("abstained", ""),
            **{figure: repr(value) for figure, value in figures.items() if isinstance(value, float | int)},
        }


def _count_rows(told: dict[str, Any]) -> Iterator[dict[str, str]]:
    for kind, streams in told["per_step"].items():
        for stream, counters in streams.items():
            if stream != "steps":
                for counter, tally in counters.items():
                    figures = {figure: repr(value) for figure, value in tally.items()}
                    median = {"unit": "median/step", "value": figures["median"]}
                    yield {"metric": f"{kind}.{stream}.{counter}", **median, **figures}


def _markdown(document: dict[str, Any]) -> str:
    parts = ["```", tables.headline(document).plain, "```"]
    for table in tables.every(document, width=WIDE):
        parts += ["", f"**{table.title}**", "", *markdown_rows(table)]
    return "\n".join([*parts, "", f"`{document['run']['command']}`", ""])


def markdown_rows(table: Table) -> list[str]:
    headings = [_cell(column.header) for column in table.columns]
    ruler = ["---:" if column.justify == "right" else "---" for column in table.columns]
    body = zip(*(list(column.cells) for column in table.columns), strict=True)
    return [_line(row) for row in (headings, ruler, *([_cell(cell) for cell in row] for row in body))]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: object) -> str:
    return str(cell).replace("\n", " ").replace("|", "\\|")


def _html(outcome: RunOutcome, document: dict[str, Any]) -> str:
    console = Console(record=True, width=WIDE, file=io.StringIO(), color_system="truecolor")
    tables.render(document, console, breaches=outcome.breaches)
    scenario, *_ = _which(document)
    return page(console, title=f"{scenario} · {tables.labels(document)}")


def page(console: Console, *, title: str) -> str:
    """What a recording console was shown, as HTML."""
    escaped = html.escape(title).replace("{", "{{").replace("}", "}}")
    return console.export_html(code_format=_PAGE.replace("TITLE", escaped))
