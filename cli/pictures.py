"""Pictures of runs: where their timelines are kept, and what is drawn of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from .scenario_arguments import Format
from .text import echo

if TYPE_CHECKING:
    from ..profiles.judge.trials import Side
    from ..profiles.picture.model import Picture
    from ..profiles.record.recording import RecordedTimeline
    from ..profiles.record.result import Result
    from .page import Drawn

WantsPicture = Annotated[
    bool,
    typer.Option(
        "--picture", help="Draw a few representative steps: lanes, waits, idle time. svg and html always do."
    ),
]


def wanted(form: Format, picture: bool) -> bool:
    return picture or form in ("svg", "html")


@contextmanager
def timelines(output_dir: Path | None, *, wanted: bool) -> Iterator[Path | None]:
    """The folder for the timelines of a run: that of the output, or one for as long as a picture takes."""
    if output_dir is not None or not wanted:
        yield output_dir
        return
    with TemporaryDirectory(prefix="schedbench-picture-") as folder:
        yield Path(folder)


def drawn(result: Result, folder: Path | None) -> Drawn:
    """The picture of the timelines in ``folder`` and charts of them; nothing where there are none."""
    from ..profiles.picture.draw import picture
    from .page_charts import of_timelines

    found = _timelines(result, folder)
    return *picture(found), *of_timelines(found)


def _timelines(result: Result, folder: Path | None) -> dict[str, RecordedTimeline]:
    """None where their clocks differ."""
    from ..profiles.record.recording import read_ranks

    found = {} if folder is None else named(read_ranks(folder), result)
    if len(found) > 1 and not result.one_clock:
        echo("no picture: each rank has a clock of its own", err=True)
        return {}
    return found


def named(found: Mapping[int, RecordedTimeline], result: Result) -> dict[str, RecordedTimeline]:
    """The timelines by the names of their ranks. Ranks of an earlier run in the same folder are left out."""
    names = {rank: part.name for rank, part in enumerate(result.ranks)} or {0: "the run"}
    return {names[rank]: timeline for rank, timeline in found.items() if rank in names}


def side_by_side(a: Side, b: Side, seed: int) -> Picture:
    """A above B, from one more run of each; stored sides have the timelines beside them, if any."""
    from ..profiles.judge.worker import CrashError
    from ..profiles.picture.draw import picture
    from ..profiles.picture.model import stacked

    pictures = {}
    for name, side in {"A": a, "B": b}.items():
        with TemporaryDirectory(prefix="schedbench-picture-") as folder:
            try:
                pictures[name] = picture(_timelines(*side.recorded(seed, Path(folder))))
            except CrashError:
                echo(f"no picture of {name}: that version cannot record its timeline", err=True)
    return stacked({name: found for name, found in pictures.items() if found})
