"""Where the keys of a scenario were written, and what is wrong with them, in words."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

KeyPath = tuple[str | int, ...]


class SourceLocation(NamedTuple):
    """Where a value was written: a file and its line (from 1), or ``--set`` without one."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


OPTION = SourceLocation("--set")


class Problem(NamedTuple):
    place: SourceLocation
    path: str  # dotted key, "" for the whole file
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.place), self.path, self.message) if part)


class ScenarioError(Exception):
    """A scenario cannot be run. ``problems`` holds every problem that was found, in the order of its lines."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.place.line or sys.maxsize))
        super().__init__("\n".join(map(str, self.problems)))

    @property
    def reasons(self) -> str:
        """The problems in one line, without their places."""
        return "; ".join(dict.fromkeys(f"{problem.path}: {problem.message}" for problem in self.problems))

    def __reduce__(self) -> tuple[type[ScenarioError], tuple[object]]:
        """Pickled as the problems, since it may be raised in another process."""
        return ScenarioError, (self.problems,)


@dataclass(frozen=True, slots=True)
class ScenarioSource:
    """Where the keys of a scenario were written. ``folder`` holds the scenario file: relative paths in the file start
    there, paths in overrides start at the working directory."""

    places: Mapping[KeyPath, SourceLocation] = field(default_factory=lambda: {(): SourceLocation("scenario")})
    folder: Path = Path()
    overridden: frozenset[KeyPath] = frozenset()

    def place(self, path: KeyPath) -> SourceLocation:
        """Where ``path`` is written, or the nearest section around it."""
        while path not in self.places:
            path = path[:-1]
        return self.places[path]

    def problem(self, path: KeyPath, message: str) -> Problem:
        return Problem(self.place(path), dotted(path), message)

    def refuse(self, path: KeyPath, message: str) -> ScenarioError:
        """The error to raise when a well-formed value turns out to be impossible."""
        return ScenarioError([self.problem(path, message)])

    def locate(self, path: KeyPath, text: str) -> Path:
        """The file that ``text``, written at ``path``, names."""
        return Path(text) if self.place(path) == OPTION else self.folder / text


def touches(problem: Problem, others: Iterable[Problem]) -> bool:
    """Whether one of ``others`` is about the same key, its section, or a key within it."""
    path = f"{problem.path}."
    return any(path.startswith(f"{other.path}.") or f"{other.path}.".startswith(path) for other in others)


def dotted(path: KeyPath) -> str:
    return ".".join(
        text if text.isprintable() and 0 < len(text) <= 60 else show(text) for text in map(str, path)
    )


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that is most similar to ``word``; None when none is similar."""
    close = difflib.get_close_matches(word[:60], list(names), n=1)
    return close[0] if close else None


def meant(word: object, names: Iterable[str]) -> str:
    """The end of a message: a question with the most similar name, or nothing."""
    name = nearest(word, names) if isinstance(word, str) else None
    return f", did you mean '{name}'?" if name and name != word else ""


def unknown(what: str, word: str, names: Sequence[str]) -> str:
    """A message: ``what`` is not among ``names``, with the most similar of them, or all when none is similar."""
    known = f", known: {', '.join(names)}" if names else ""
    return f"unknown {what}{meant(word, names) or known}"


def either(choices: Sequence[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1]))) if choices else ""


def show(value: object) -> str:
    """The value as it is written in YAML, shortened and always printable."""
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
