"""``schedbench trace``: a run's timeline, or a capture's, as a picture for Perfetto or Chrome."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import UsageError
from .report import Meaning, Tool

if TYPE_CHECKING:
    from ..profiles.recording import Recorded

Source = Annotated[
    Path,
    typer.Argument(metavar="RESULT", help="A result.json of run --output-dir, its folder, or a capture."),
]
Output = Annotated[
    Path | None, typer.Option(help="The file to write; else perfetto.json.gz beside the source.")
]


def trace(source: Source, output: Output = None, meaning: Meaning = None, nsys: Tool = None) -> None:
    """Write a timeline as Chrome's JSON: host ranges and calls, streams, copy engines, waits. ui.perfetto.dev opens it.

    Exit codes: 0 done; 2 nothing to draw; 3 a file that cannot be written, or no nsys to export with.
    """
    from ..profiles.perfetto import draw

    found = _found(source, meaning, nsys)
    path = output or _beside(source)
    slices = draw(path, found.windows, found.sites, found.streams)
    typer.echo(f"{path}: {slices:,} events")
    if found.left_out:
        typer.echo(f"the run was too long: {found.left_out:,} records at its end are not in it", err=True)


def _found(source: Path, meaning: str | None, nsys: str | None) -> Recorded:
    """Of a run what was recorded beside its result; else what the capture says."""
    from ..profiles.captures.files import Reader
    from ..profiles.recording import FILE, read_recording

    folder = source if source.is_dir() else source.parent
    if source.is_dir() or source.name == "result.json":
        if not (folder / FILE).is_file():
            raise UsageError(f"{source}: no {FILE} beside it; `run --output-dir` keeps one")
        return read_recording(folder / FILE)
    if source.name.endswith(FILE):
        return read_recording(source)
    return Reader(meaning, nsys).timeline(source)


def _beside(source: Path) -> Path:
    from ..profiles.captures.files import stem
    from ..profiles.perfetto import ENDING

    if source.is_dir():
        return source / ENDING
    own = source.name.startswith(("result.", "timeline."))
    return source.with_name(ENDING if own else f"{stem(source)}.{ENDING}")
