"""The Python interface: the results of the command line as objects. ``import schedbench`` has these functions.

Keyword arguments have the names of options, or are keys of the scenario, shortened as for ``--set``: ``run("mixed",
engine="sglang:../sglang", overlap=False)``. Errors are those of the command line, with the names of arguments in place
of options. Nothing is printed.
"""

from __future__ import annotations

from pathlib import Path

from . import check as checks
from . import compare as comparisons
from . import run as runs
from . import worth as worths
from .answers import Answer, CheckAnswer, ComparisonAnswer, RunAnswer, WorthAnswer, stored
from .command import from_python

run = from_python(runs.run, RunAnswer)
worth = from_python(worths.worth, WorthAnswer)
check = from_python(checks.check, CheckAnswer)
compare = from_python(comparisons.compare, ComparisonAnswer)


def load(path: str | Path) -> Answer:
    """The answer in a stored document of any command, in its folder, or in a capture. Raises what ``schedbench report``
    raises."""
    from ..profiles.captures.files import Reader

    return stored(Path(path), Reader(command=f"schedbench.load({str(path)!r})"))
