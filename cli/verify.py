"""``schedbench verify``: the virtual GPU's prediction, the process's own counts and CUPTI's, side by side."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .errors import GATE_FAILED, INTERRUPTED
from .question import asked, folder

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Document = dict[str, Any]
Format = Literal["table", "json", "md"]
_SOURCES = ("predicted", "announced", "recorded")
_LINES = 60  # rows shown in a table; json and md have all


def verify(
    scenario: Annotated[str, typer.Argument(help="A scenario file, or the name of a shipped one.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override any key, e.g. engine.overlap=false."),
    ] = None,
    relay: Annotated[str | None, typer.Option(help="A relay state instead of the scenario's.")] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Keep verify.json, both results and the counts here.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="What to print on stdout.")] = "table",
) -> None:
    """Hold the virtual GPU's counts against a real one's: copies, bytes, syncs and kernels, step kind by step kind
    and line by line. Known differences are told with their reason.

    All requests arrive at once and none ends early, unless --set says otherwise: what is scheduled then does not
    depend on the machine's speed.

    Exit codes: 0 they agree; 1 a difference that nothing explains; 2 usage or scenario; 3 no CUDA here;
    4 a run failed; 130 interrupted.
    """
    from ..profiles.lab import verification as comparison
    from ..profiles.lab import verification_runs

    wanted = [*verification_runs.PLAIN, *(overrides or [])]
    question = asked(scenario, wanted, relay=relay)
    verification_runs.require_cuda(question)
    folder(output_dir)
    settings = [*wanted, *([] if relay is None else [f"engine.relay={relay}"])]
    with _place(output_dir) as place:
        plan = verification_runs.stages(scenario, settings, Path(place))
        try:
            found = verification_runs.conduct(plan, Path(place), lambda words: typer.echo(words, err=True))
        except KeyboardInterrupt:
            typer.echo("schedbench: interrupted before there was anything to compare", err=True)
            raise typer.Exit(INTERRUPTED) from None
    document = comparison.document(found)
    if output_dir is not None:
        _keep(document, output_dir)
    _show(document, form)
    raise typer.Exit(0 if found.agrees else GATE_FAILED)


def _place(output_dir: Path | None) -> AbstractContextManager[Path | str]:
    return tempfile.TemporaryDirectory() if output_dir is None else nullcontext(output_dir)


def _keep(document: Document, output_dir: Path) -> None:
    from ..profiles.record.files import write_whole

    write_whole(output_dir / "verify.json", json.dumps(document, indent=1) + "\n")


def _show(document: Document, form: Format) -> None:
    if form == "json":
        typer.echo(json.dumps(document, indent=1))
    elif form == "md":
        sys.stdout.write(markdown(document))
    else:
        from .console import results

        render(document, results())


def verdict(document: Document) -> str:
    """One line."""
    differ = len(document["unexplained"])
    known = len(document["explained"])
    unlike = ", ".join(kind for kind, counts in document["steps"].items() if len(set(counts)) > 1)
    parts = [
        f"{document['compared']} counts compared",
        f"{differ} differ and nothing explains it" if differ else "none differs without a reason",
        f"{known} differ as they should",
        *([f"not the same steps: {unlike}"] if unlike else ()),
        *document["trouble"],
    ]
    return f"{'agree' if document['agrees'] else 'DISAGREE'}: {'; '.join(parts)}"


def render(document: Document, console: Console) -> None:
    """The verdict, the steps, what is a finding and what is explained."""
    console.print(verdict(document), markup=False)
    for title, rows in _tables(document):
        console.print()
        console.print(_table(title, rows[:_LINES], hidden=len(rows) - _LINES))
    for name, reason in _reasons(document):
        console.print(f"{name}: {reason}", markup=False)


def _tables(document: Document) -> list[tuple[str, list[list[str]]]]:
    steps = [["", kind, "steps", *map(str, counts), ""] for kind, counts in document["steps"].items()]
    tables = [("steps of each kind", steps)]
    for title, name in (("differences without a reason", "unexplained"), ("known differences", "explained")):
        if document[name]:
            tables.append((title, [_cells(row) for row in document[name]]))
    return tables


_HEADINGS = ("source line", "of", "what", *_SOURCES, "why")


def _cells(row: Document) -> list[str]:
    where = f"{row['file']}: {row['statement']}" if row["file"] else ""
    of = " · ".join(word for word in (row["stream"], row["range"], row["kind"]) if word)
    return [where, of, row["what"], *(_tally(row[name]) for name in _SOURCES), row["why"]]


def _tally(tally: dict[str, float] | None) -> str:
    from .numbers import MISSING, number, size, whole

    if tally is None:
        return MISSING
    count = number(whole(tally["count"]))
    return f"{count} ({size(int(tally['bytes']))})" if tally["bytes"] else count


def _reasons(document: Document) -> list[tuple[str, str]]:
    from ..profiles.lab.verification import EXPLANATIONS

    met = {row["why"] for row in document["explained"]}
    return [(one.name, one.reason) for one in EXPLANATIONS if one.name in met]


def _table(title: str, rows: Sequence[list[str]], *, hidden: int) -> Table:
    from rich.markup import escape

    from .frames import framed

    table = framed(title, caption=f"and {hidden} more" if hidden > 0 else "")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading in _SOURCES else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def markdown(document: Document) -> str:
    """Every difference, as tables of Markdown."""
    lines = [f"# {verdict(document)}", ""]
    for title, rows in _tables(document):
        lines += [f"## {title}", "", _md(_HEADINGS), _md(["---"] * len(_HEADINGS)), *map(_md, rows), ""]
    lines += [f"- {name}: {reason}" for name, reason in _reasons(document)]
    return "\n".join(lines).rstrip() + "\n"


def _md(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
