"""``schedbench baseline``: results that are kept by a name, and later results compared with them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .arguments import EveryTable, Form, UndrawnForm
from .command import command
from .compare import Gates, Undecided, compare
from .errors import UsageError
from .report import report
from .text import echo

if TYPE_CHECKING:
    from ..profiles.record.result import Result
    from .answers import CasesAnswer, ComparisonAnswer

FOLDER: Final = Path(".schedbench/baselines")

baseline = typer.Typer(
    help="Keep results by a name, and compare later ones with them.",
    no_args_is_help=True,
    add_completion=False,
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the baseline.")]
Folder = Annotated[Path, typer.Option("--folder", metavar="DIR", help="Where baselines are kept.")]
Results = Annotated[
    list[Path],
    typer.Argument(
        metavar="RESULT...", help="Files that run --output-dir or --format json wrote, or folders of them."
    ),
]


@baseline.command("save")
def save(
    name: Name,
    results: Results,
    folder: Folder = FOLDER,
    force: Annotated[bool, typer.Option("--force", help="Replace the baseline of that name.")] = False,
) -> None:
    """Keep results as the baseline NAME.

    Exit codes: 0 done; 2 no result, a partial one, or there is a baseline of that name; 4 a run that failed.
    """
    from ..profiles.judge.sides import require_whole, stored_in
    from ..profiles.record.result import read

    place = place_of(folder, name)
    if place.exists() and not force:
        raise UsageError(f"baseline {name}: exists in {folder}; --force replaces it")
    paths = [path for given in results for path in (stored_in(given) if given.is_dir() else (given,))]
    kept = [read(path) for path in paths]
    for path, result in zip(paths, kept, strict=True):
        require_whole(result, str(path))
    keep(place, kept)
    echo(f"baseline {name}: {len(kept)} result{'s' * (len(kept) > 1)} in {place}")


@baseline.command("list")
def listing(folder: Folder = FOLDER, form: UndrawnForm = "table") -> None:
    """List the baselines."""
    from ..profiles.record.result import read
    from .list import table
    from .page import show_entries

    entries = []
    for place in sorted(folder.glob("*/")):
        found = [read(path) for path in sorted(place.glob("*.json"))]
        if found:
            scenario, relay = found[0].scenario.expanded.get("name"), found[0].relay.state
            about = f"{scenario} · relay {relay} · {len(found)} run{'s' * (len(found) > 1)} · {found[0].run.started}"
            entries.append({"name": place.name, "about": about})
    show_entries(form, "baselines", entries, table(entries) or f"no baseline in {folder}")


@baseline.command("show")
def show(name: Name, folder: Folder = FOLDER, every_table: EveryTable = False, form: Form = "table") -> None:
    """Print the results of a baseline as report does."""
    report(stored(folder, name), every_table=every_table, form=form)


def compare_with(
    name: Name,
    result: Annotated[str, typer.Argument(metavar="RESULT", help="A stored result, or a folder of them.")],
    folder: Folder = FOLDER,
    gates: Gates = (),
    undecided: Undecided = "fail",
) -> ComparisonAnswer | CasesAnswer:
    """Compare a baseline, as A, with later results, as B.

    Exit codes: those of compare.
    """
    stored(folder, name)
    return compare(place_of(folder, name), result, gates=gates, undecided=undecided)


baseline.command("compare")(command(compare_with))


def stored(folder: Path, name: str) -> list[Path]:
    """The files of a baseline. Raises UsageError, naming all others, where there is none of that name."""
    from ..scenarios.problems import unknown

    found = sorted(place_of(folder, name).glob("*.json"))
    if not found:
        names = sorted(place.name for place in folder.glob("*/"))
        said = f"{unknown('baseline', name, names)} in {folder}"
        raise UsageError(f"baseline {name}: {said}; `baseline save` or `pytest --schedbench-save` keeps one")
    return found


def keep(place: Path, results: Sequence[Result]) -> None:
    """Write the results of a baseline in place of those that are there."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for number, result in enumerate(results):
        result.write(place / f"run-{number:03d}.json")


def place_of(folder: Path, name: str) -> Path:
    """The folder of a baseline. Raises UsageError."""
    if Path(name).name != name or name in ("", ".."):
        raise UsageError(f"baseline {name!r}: a name, not a path")
    return folder / name
