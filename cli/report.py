"""``schedbench report``: print stored documents, and captures made by other tools."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .arguments import EveryTable, Form, Meaning, Tool, WantsPicture, command_line
from .errors import UsageError
from .text import printable, printable_json

Files = Annotated[
    list[Path],
    typer.Argument(
        help="The document or the --output-dir of a command, .nsys-rep, its .sqlite export, or a trace of torch's "
        "profiler (.json, .json.gz)."
    ),
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
    from .pictures import drawn
    from .result_page import csv_of

    reader = Reader(meaning, nsys, command_line())
    if scrubbed is not None:
        if len(files) != 1:
            raise UsageError("--scrubbed takes one capture")
        reader.scrubbed(files[0], scrubbed)
        files = [scrubbed]
    if form == "svg" and len(files) > 1:
        raise UsageError("--format svg is one picture: give one file")
    found = [stored(path, reader) for path in files]
    if form == "csv" and all(isinstance(answer, RunAnswer) for answer in found):
        sys.stdout.write(printable(csv_of([answer.document for answer in found])))
        return
    if form == "json" and len(found) > 1:
        sys.stdout.write(printable_json("[\n" + ",\n".join(answer.to_json() for answer in found) + "]\n"))
        return
    for number, (path, answer) in enumerate(zip(files, found, strict=True)):
        if isinstance(answer, RunAnswer) and (picture or form in ("svg", "html")):
            folder = path if path.is_dir() else path.parent
            answer = replace(answer, picture=drawn(answer.result, folder))
        sys.stdout.write("\n" if number else "")
        answer.show(form, every_table=every_table)
