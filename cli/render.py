"""A result in the form that was asked for. Tables are made once, in ``tables``; the forms differ in paint."""

from __future__ import annotations

import csv
import io
import sys
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from . import tables

if TYPE_CHECKING:
    from ..profiles.execute import Outcome

Format = Literal["table", "json", "md", "csv", "html"]
WIDE = 160  # columns of a page that nobody's terminal limits


def show(outcome: Outcome, console: Console, form: Format) -> None:
    """Print the outcome on stdout; what was broken goes to stderr where stdout is a document."""
    if form == "table":
        tables.render(outcome.result.document(), console, breaches=outcome.breaches)
    else:
        sys.stdout.write(text(outcome, form))
        if outcome.breaches:
            print(tables.budget(outcome.breaches, width=console.width).plain, file=sys.stderr)
    for kind in outcome.untested:
        print(f"expect: no step was of kind {kind}; its budget is untested", file=sys.stderr)


def text(outcome: Outcome, form: Format) -> str:
    if form == "json":
        return outcome.result.to_json()
    document = outcome.result.document()
    if form == "csv":
        return _csv(document)
    return _markdown(document) if form == "md" else _html(outcome, document)


def _csv(document: dict[str, Any]) -> str:
    """One row per metric, and per count of a kind and stream."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["metric", "unit", "value", "abstained"])
    for name, metric in document["metrics"].items():
        values = metric.get("values")
        value = repr(sum(values) / len(values)) if values else ""
        writer.writerow([name, metric.get("unit", ""), value, metric.get("abstained", "")])
    for kind, streams in document["per_step"].items():
        for stream, counters in streams.items():
            if stream != "steps":
                for counter, tally in counters.items():
                    writer.writerow([f"{kind}.{stream}.{counter}", "median/step", repr(tally["median"]), ""])
    return out.getvalue()


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


def _html(outcome: Outcome, document: dict[str, Any]) -> str:
    console = Console(record=True, width=WIDE, file=io.StringIO(), color_system="truecolor")
    tables.render(document, console, breaches=outcome.breaches)
    return console.export_html()
