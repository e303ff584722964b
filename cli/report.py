"""``schedbench report``: print stored results, and captures made by other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import UsageError
from .pictures import WantsPicture, drawn, wanted
from .scenario_arguments import EveryTable, Form, Format
from .stopwatch import command_line
from .text import printable, printable_json

if TYPE_CHECKING:
    from ..profiles.record.result import Result
    from .page import Drawn

Files = Annotated[
    list[Path],
    typer.Argument(
        help="result.json, .nsys-rep, its .sqlite export, or a trace of torch's profiler (.json, .json.gz)."
    ),
]
Meaning = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="FILE",
        help="The map of a capture's ranges: sglang, schedbench, or a file; else the one that fits (docs/captures.md).",
    ),
]
Tool = Annotated[
    str | None, typer.Option("--nsys", metavar="PATH", help="The nsys that exports .nsys-rep files.")
]


def report(
    files: Files,
    meaning: Meaning = None,
    nsys: Tool = None,
    scrubbed: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.sqlite",
            help="Write the part of one nsys capture that schedbench reads, without environment variables.",
        ),
    ] = None,
    every_table: EveryTable = False,
    picture: WantsPicture = False,
    form: Form = "table",
) -> None:
    """Print stored results and captures in the same way as run prints its result.

    Exit codes: 0 done; 2 a file of another kind, or an invalid map; 3 an .nsys-rep and no nsys to export it with.
    """
    from ..profiles.captures.files import Reader

    reader = Reader(meaning, nsys, command_line())
    if scrubbed is not None:
        if len(files) != 1:
            raise UsageError("--scrubbed takes one capture")
        reader.scrubbed(files[0], scrubbed)
        files = [scrubbed]
    found = [reader.read(path) for path in files]
    shows = wanted(form, picture)
    pictures = [
        drawn(result, path.parent) if shows else () for result, path in zip(found, files, strict=True)
    ]
    _show(found, pictures, form, every_table=every_table)


def _show(found: list[Result], pictures: list[Drawn], form: Format, *, every_table: bool) -> None:
    from ..profiles.measure.budget import RunOutcome, asked, breaches
    from .outcome import csv_of, show

    if form == "csv":
        sys.stdout.write(printable(csv_of([result.document() for result in found])))
    elif form == "json" and len(found) > 1:
        sys.stdout.write(printable_json("[\n" + ",\n".join(result.to_json() for result in found) + "]\n"))
    else:
        for number, (result, picture) in enumerate(zip(found, pictures, strict=True)):
            if number:
                sys.stdout.write("\n")
            outcome = RunOutcome(result, tuple(breaches(asked(result).budget, result)), ())
            show(outcome, form, every_table=every_table, picture=picture)
