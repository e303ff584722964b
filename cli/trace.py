"""``schedbench trace``: write the timeline of a run or a capture for Perfetto or Chrome."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import Meaning, Tool
from .errors import UsageError
from .text import echo

if TYPE_CHECKING:
    from ..profiles.record.recording import RecordedTimeline
    from ..profiles.record.result import Result

Source = Annotated[
    Path,
    typer.Argument(metavar="RESULT", help="A result.json of run --output-dir, its folder, or a capture."),
]
Output = Annotated[
    Path | None,
    typer.Option(help="The file to write, such as run.pftrace; else perfetto.json.gz beside the source."),
]


def trace(source: Source, output: Output = None, meaning: Meaning = None, nsys: Tool = None) -> None:
    """Write a timeline for ui.perfetto.dev: host ranges and calls, streams, copy engines, waits, steps and idle time,
    with flows from launches to kernels and from what ended to what waited for it. A file that ends in .pftrace is
    Perfetto's protobuf, any other Chrome's JSON; both are gzipped where the name ends in .gz.

    Exit codes: 0 done; 2 nothing to draw, or a run without a result; 3 a file that cannot be written, or no nsys to
    export with.
    """
    from ..profiles.picture.trace import content, draw
    from ..profiles.record.conclusion import numbers
    from ..profiles.record.recording import RESULT, is_recording

    path = output or _beside(source)
    if path.name == RESULT or is_recording(path.name) or path.resolve() == source.resolve():
        raise UsageError(f"{path}: the trace needs another name")
    found, result = _found(source, meaning, nsys)
    arrivals = _arrivals(result) if len(found) == 1 and result is not None else ()
    flows = count(1)
    kind = "" if result is None else f", {numbers(result.labels.model_dump(), result.hardware.name)}"
    drawn = {f"{name}{kind}": content(timeline, arrivals, flows) for name, timeline in found.items()}
    echo(f"{path}: {draw(path, drawn):,} events")
    left_out = sum(timeline.left_out for timeline in found.values())
    if left_out:
        echo(f"the run was too long: {left_out:,} records at its end are not in it", err=True)


def _arrivals(result: Result) -> list[tuple[int, int]]:
    """Of each request the instants of its arrival and its first token, or of its end without one."""
    ends = [
        (row.arrival, row.finish if row.first_token is None else row.first_token) for row in result.requests
    ]
    return [(arrival, end) for arrival, end in ends if end is not None]


def _found(
    source: Path, meaning: str | None, nsys: str | None
) -> tuple[dict[str, RecordedTimeline], Result | None]:
    """The timelines of all ranks of a run with its result, or that of a capture."""
    from ..profiles.captures.files import Reader
    from ..profiles.record.recording import FILE, is_recording, read_ranks, read_recording

    if source.is_dir() or source.name == "result.json":
        folder = source if source.is_dir() else source.parent
        found = read_ranks(folder)
        if not found:
            raise UsageError(f"{folder}: no {FILE} there; `run --output-dir` keeps one")
        return _of_ranks(found, folder)
    if is_recording(source.name):
        return {"": read_recording(source)}, None
    return {"": Reader(meaning, nsys).timeline(source)}, None


def _of_ranks(found: dict[int, RecordedTimeline], folder: Path) -> tuple[dict[str, RecordedTimeline], Result]:
    """The timelines by the names of their ranks in the result, which exists once the run is over."""
    from ..profiles.record.recording import RESULT, timeline_file
    from ..profiles.record.result import read

    if not (folder / RESULT).is_file():
        kept = ", ".join(str(folder / timeline_file(rank)) for rank in found)
        raise UsageError(
            f"{folder}: no {RESULT}: the run is not over, or was cut short; what it recorded can be drawn alone: {kept}"
        )
    result = read(folder / RESULT)
    if not result.one_clock:
        echo(
            "each rank has a clock of its own: events drawn side by side need not have happened at the same time",
            err=True,
        )
    for rank, part in enumerate(result.ranks):
        if rank not in found:
            echo(f"no {timeline_file(rank)}: nothing of {part.name} is drawn", err=True)
    return named(found, result), result


def named(found: Mapping[int, RecordedTimeline], result: Result) -> dict[str, RecordedTimeline]:
    """The timelines by the names of their ranks. Ranks of an earlier run in the same folder are left out."""
    names = {rank: part.name for rank, part in enumerate(result.ranks)} or {0: "the run"}
    return {names[rank]: timeline for rank, timeline in found.items() if rank in names}


def _beside(source: Path) -> Path:
    from ..profiles.captures.files import stem
    from ..profiles.record.files import ENDING

    if source.is_dir():
        return source / ENDING
    own = source.name.startswith(("result.", "timeline."))
    return source.with_name(ENDING if own else f"{stem(source)}.{ENDING}")
