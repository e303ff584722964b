"""The scenarios that come with the package, and the cases among them. Reads YAML only, so that listing is quick."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final

import yaml

CASES: Final = "cases"  # their folder, and what their names begin with
FAULTS: Final = "faults"


def names() -> list[str]:
    return _names(files(__package__))


def case_names() -> list[str]:
    """``cases/NAME`` of every case."""
    return _names_in(CASES)


def fault_names() -> list[str]:
    """``faults/NAME`` of every scenario in which known bugs show."""
    return _names_in(FAULTS)


def content(name: str) -> bytes:
    return files(__package__).joinpath(f"{name}.yaml").read_bytes()


def catalog() -> list[dict[str, str]]:
    """``name`` and ``about`` of every shipped scenario, in order of name."""
    documents = {name: _document(name) for name in names()}
    return [{"name": name, "about": document["about"]} for name, document in documents.items()]


def case_catalog() -> list[dict[str, str]]:
    """``name``, ``about`` and the ``case`` section of every case, in order of name."""
    documents = {name: _document(name) for name in case_names()}
    return [{"name": name, "about": found["about"], **found["case"]} for name, found in documents.items()]


def _names_in(folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in _names(files(__package__).joinpath(folder))]


def _names(folder: Traversable) -> list[str]:
    entries = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml"))


def _document(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(content(name))
    return document
