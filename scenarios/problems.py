"""What is wrong with a scenario, in words: where, what was expected, what stands there, what was meant."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .schema import Scenario

KeyPath = tuple[str | int, ...]


class SourceLocation(NamedTuple):
    """Where a value was written: a file and its line (from 1), or ``--set`` without one."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


class Problem(NamedTuple):
    place: SourceLocation
    path: str  # dotted key, "" for the whole file
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.place), self.path, self.message) if part)


class ScenarioError(Exception):
    """A scenario that cannot be run, with every problem that was found in it, in the order of its lines. ``rest`` is
    what remains without the broken keys, for whoever can find more."""

    def __init__(self, problems: Iterable[Problem], rest: Scenario | None = None) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.place.line or sys.maxsize))
        self.rest = rest
        super().__init__("\n".join(map(str, self.problems)))


def touches(problem: Problem, others: Iterable[Problem]) -> bool:
    """Whether another problem is about the same key, its section, or a key within it."""
    path = f"{problem.path}."
    return any(path.startswith(f"{other.path}.") or f"{other.path}.".startswith(path) for other in others)


def dotted(path: KeyPath) -> str:
    return ".".join(_plain(part) for part in path)


def _plain(part: str | int) -> str:
    text = str(part)
    return text if text.isprintable() and 0 < len(text) <= 60 else show(text)


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that ``word`` was probably meant to be; None when nothing is near."""
    close = difflib.get_close_matches(word[:60], list(names), n=1)
    return close[0] if close else None


def meant(word: object, names: Iterable[str]) -> str:
    """A clause to end a message with: the nearest name, or nothing."""
    name = nearest(word, names) if isinstance(word, str) else None
    return f", did you mean '{name}'?" if name and name != word else ""


def unknown(what: str, word: str, names: Sequence[str]) -> str:
    """``what`` is not among ``names``: the nearest of them, or all when none is near."""
    known = f", known: {', '.join(names)}" if names else ""
    return f"unknown {what}{meant(word, names) or known}"


def either(choices: Sequence[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1]))) if choices else ""


def show(value: object) -> str:
    """The value as its writer would recognise it, never long and always printable."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case str():
            return ascii(_cut(value))
    return _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
