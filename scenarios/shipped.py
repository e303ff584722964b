"""The scenarios that come with the package, and the cases among them. Reads YAML only, so that listing is quick."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import yaml


def names(folder: str = "") -> list[str]:
    """The scenarios of the folder, such as ``cases/``, whose names begin with it; without it, those in none."""
    return [f"{folder}{name}" for name in names_in(files(__package__).joinpath(folder))]


def case_names() -> list[str]:
    """``cases/NAME`` of every case."""
    return names("cases/")


def fault_names() -> list[str]:
    """``faults/NAME`` of every scenario in which known bugs show."""
    return names("faults/")


def content(name: str) -> bytes:
    return files(__package__).joinpath(f"{name}.yaml").read_bytes()


def catalog(of: Iterable[str]) -> list[dict[str, Any]]:
    """``name``, ``about`` and, of a case, the ``case`` section of these scenarios."""
    documents = {name: yaml.safe_load(content(name)) for name in of}
    return [
        {"name": name, "about": found["about"], **found.get("case", {})} for name, found in documents.items()
    ]


def names_in(folder: Traversable) -> list[str]:
    """The names of its YAML files, in alphabetical order."""
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))
