"""The YAML files of packages: scenarios with the cases among them, and files of one model each, such as hardware
profiles. Reads YAML only, so that listing is quick."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from .document import MAX_BYTES, read
from .problems import ScenarioError, ScenarioSource, meant, show

M = TypeVar("M", bound=BaseModel)
CASES: Final = "cases"  # their folder, and what their names begin with


def names() -> list[str]:
    return _names("")


def case_names() -> list[str]:
    """``cases/NAME`` of every case."""
    return _names(f"{CASES}/")


def fault_names() -> list[str]:
    """``faults/NAME`` of every scenario in which known bugs show."""
    return _names("faults/")


def content(name: str) -> bytes:
    return files(__package__).joinpath(f"{name}.yaml").read_bytes()


def catalog() -> list[dict[str, Any]]:
    """``name`` and ``about`` of every shipped scenario, in order of name."""
    documents = {name: _document(name) for name in names()}
    return [{"name": name, "about": document["about"]} for name, document in documents.items()]


def case_catalog() -> list[dict[str, Any]]:
    """``name``, ``about`` and the ``case`` section of every case, in order of name."""
    documents = {name: _document(name) for name in case_names()}
    return [{"name": name, "about": found["about"], **found["case"]} for name, found in documents.items()]


def _names(folder: str, package: str = __package__) -> list[str]:
    entries = (entry.name for entry in files(package).joinpath(folder).iterdir())
    return sorted(f"{folder}{name.removesuffix('.yaml')}" for name in entries if name.endswith(".yaml"))


def _document(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(content(name))
    return document


@dataclass(frozen=True, slots=True)
class ModelFiles(Generic[M]):
    """The files of ``package``, and of the user's, that hold a ``model`` each, which messages call ``kind``. All faults
    of a file are raised as one ``error``."""

    package: str
    kind: str
    model: type[M]
    error: type[ValueError]

    def names(self) -> list[str]:
        """Those of the package, in alphabetical order."""
        return _names("", self.package)

    def content(self, name_or_path: str | Path) -> bytes:
        """The content of the package's file of that name, or of the user's file."""
        name, path = str(name_or_path), Path(name_or_path)
        if name in self.names():
            return files(self.package).joinpath(f"{name}.yaml").read_bytes()
        try:
            if path.is_file():
                with path.open("rb") as file:
                    return file.read(MAX_BYTES + 1)
        except OSError as error:
            raise self.error(f"{show(name)}: cannot be read: {error.strerror or error}") from None
        known = self.names()
        raise self.error(f"no {self.kind} {name!r}{meant(name, known)} (available: {', '.join(known)})")

    def parse(self, content: bytes, file: str) -> M:
        """The model in the content of ``file``. Each fault has its line, or that of the innermost section around it."""
        try:
            document = read(content, file)
        except ScenarioError as error:
            raise self.error(str(error)) from None
        if not isinstance(document.data, dict):
            raise self.error(f"{file}:1: expected a mapping, got {show(document.data)}")
        problems, source = document.problems, ScenarioSource(document.places)
        try:
            found = self.model.model_validate(document.data)
        except ValidationError as error:
            for fault in error.errors(include_url=False, include_input=False):
                path = tuple(part for part in fault["loc"] if not str(part).startswith("function-"))
                problems.append(source.problem(path, fault["msg"]))
        if problems:
            raise self.error("; ".join(map(str, problems)))
        return found
