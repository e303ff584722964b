"""Where a scenario's keys were written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .problems import KeyPath, Problem, ScenarioError, SourceLocation, dotted


@dataclass(frozen=True, slots=True)
class ScenarioSource:
    """``folder`` holds the scenario file: relative paths in it start there, overridden ones do not."""

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
        return Path(text) if path in self.overridden else self.folder / text
