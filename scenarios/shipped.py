"""The scenarios that come with the package, and the cases among them. Reads YAML only, so that listing is quick."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final

import yaml

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


def _names(folder: str) -> list[str]:
    return [f"{folder}{name}" for name in names_in(files(__package__).joinpath(folder))]


def names_in(folder: Traversable) -> list[str]:
    """The names of its YAML files, in alphabetical order."""
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _document(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(content(name))
    return document
