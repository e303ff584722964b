"""``schedbench report``: print stored documents, and captures made by other tools."""

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
    from .answers import Answer
    from .page import Drawn

Files = Annotated[
    list[Path],
    typer.Argument(
        help="The document or the --output-dir of a command, .nsys-rep, its .sqlite export, or a trace of torch's "
        "profiler (.json, .json.gz)."
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
    """Print stored results of run, compare, check, sweep and onebatch as these commands do, and captures as run does.

    Exit codes: 0 done; 2 a file of another kind, or an invalid map; 3 an .nsys-rep and no nsys to export it with.
    """
    from ..profiles.captures.files import Reader
    from .answers import RunAnswer, stored

    reader = Reader(meaning, nsys, command_line())
    if scrubbed is not None:
        if len(files) != 1:
            raise UsageError("--scrubbed takes one capture")
        reader.scrubbed(files[0], scrubbed)
        files = [scrubbed]
    found = [stored(path, reader) for path in files]
    folders = [path if path.is_dir() else path.parent for path in files]
    pictures = [
        drawn(answer.result, folder) if wanted(form, picture) and isinstance(answer, RunAnswer) else ()
        for answer, folder in zip(found, folders, strict=True)
    ]
    _show(found, pictures, form, every_table=every_table)


def _show(found: list[Answer], pictures: list[Drawn], form: Format, *, every_table: bool) -> None:
    from .answers import RunAnswer
    from .outcome import csv_of

    runs = [answer for answer in found if isinstance(answer, RunAnswer)]
    if form == "csv" and len(runs) == len(found):
        sys.stdout.write(printable(csv_of([run.document for run in runs])))
    elif form == "json" and len(found) > 1:
        sys.stdout.write(printable_json("[\n" + ",\n".join(answer.to_json() for answer in found) + "]\n"))
    else:
        for number, (answer, drawing) in enumerate(zip(found, pictures, strict=True)):
            if number:
                sys.stdout.write("\n")
            answer.show(form, every_table=every_table, picture=drawing)
