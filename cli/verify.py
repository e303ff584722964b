"""``schedbench verify``: the counts of the virtual GPU beside those of a real one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import Name, Overrides, Relay, UndrawnForm, make_output_dir, resolved, with_relay
from .errors import GATE_FAILED
from .text import MISSING, echo, number, size, whole

if TYPE_CHECKING:
    from rich.table import Table

    from .page import Document, Page

_SOURCES = ("predicted", "announced", "recorded")
_HEADINGS = ("source line", "of", "what", *(f">{source}" for source in _SOURCES), "why")
_LINES = 60  # rows of a table on a terminal


def verify(
    scenario: Name,
    overrides: Overrides = (),
    relay: Relay = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Keep verify.json, both results and the counts here.")
    ] = None,
    form: UndrawnForm = "table",
) -> None:
    """Compare the counts of the virtual GPU with those of a real one: copies, bytes, syncs and kernels, by kind of step
    and source line. Known differences are listed with their reason.

    Unless --set says otherwise, all requests arrive at once and none ends early, so that the schedule does not depend
    on the speed of the machine.

    Exit codes: 0 the counts agree; 1 a difference without a known reason; 2 usage or scenario; 3 no CUDA here;
    4 a run failed; 130 interrupted, or 143 terminated.
    """
    from ..profiles.lab import verification as comparison
    from ..profiles.record.files import write_whole
    from .page import show

    wanted = [*comparison.ONE_SCHEDULE, *overrides]
    question = resolved(scenario, wanted, relay=relay)
    comparison.require_cuda(question)
    make_output_dir(output_dir)
    settings = with_relay(relay, wanted)
    work = tempfile.TemporaryDirectory() if output_dir is None else nullcontext(output_dir)
    with work as folder:
        plan = comparison.stages(str(scenario), settings, Path(folder))
        document = comparison.conduct(plan, Path(folder), lambda words: echo(words, err=True))
    text = json.dumps(document, indent=1) + "\n"
    if output_dir is not None:
        write_whole(output_dir / "verify.json", text)
    limit = _LINES if form == "table" else None
    show(form, lambda _: page(document, limit=limit), json=lambda: text)
    raise typer.Exit(0 if document["agrees"] else GATE_FAILED)


def page(document: Document, *, limit: int | None = None) -> Page:
    """Tables have at most ``limit`` rows."""
    from rich.text import Text

    from ..profiles.lab.verification import EXPLANATIONS
    from .page import Page

    met = {row["why"] for row in document["explained"]}
    reasons = [Text(f"{one.name}: {one.reason}") for one in EXPLANATIONS if one.name in met]
    return Page("verify", [*_tables(document, limit), *reasons], document["conclusion"])


def _tables(document: Document, limit: int | None) -> Iterator[Table]:
    steps = [["", kind, "steps", *map(str, counts), ""] for kind, counts in document["steps"].items()]
    yield _table("steps of each kind", steps, limit)
    for title, name in (
        ("differences without a known reason", "unexplained"),
        ("known differences", "explained"),
    ):
        if document[name]:
            yield _table(title, [_cells(row) for row in document[name]], limit)


def _table(title: str, rows: list[list[str]], limit: int | None) -> Table:
    from .page import framed

    shown = rows[:limit]
    hidden = len(rows) - len(shown)
    table = framed(title, *_HEADINGS, caption=f"and {hidden} more" if hidden else "")
    for row in shown:
        table.add_row(*row)
    return table


def _cells(row: Document) -> list[str]:
    where = f"{row['file']}: {row['statement']}" if row["file"] else ""
    of = " · ".join(word for word in (row["stream"], row["range"], row["kind"]) if word)
    return [where, of, row["what"], *(_tally(row[name]) for name in _SOURCES), row["why"]]


def _tally(tally: dict[str, float] | None) -> str:
    if tally is None:
        return MISSING
    count = number(whole(tally["count"]))
    return f"{count} ({size(int(tally['bytes']))})" if tally["bytes"] else count
