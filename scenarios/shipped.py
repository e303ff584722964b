"""The scenarios that come with the package. Reads YAML only, so that listing them is quick."""

from __future__ import annotations

from importlib.resources import files

import yaml


def names() -> list[str]:
    entries = (entry.name for entry in files(__package__).iterdir())
    return sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml"))


def content(name: str) -> bytes:
    return files(__package__).joinpath(f"{name}.yaml").read_bytes()


def catalog() -> list[dict[str, str]]:
    """``name`` and ``about`` of every shipped scenario, in order of name."""
    documents = {name: yaml.safe_load(content(name)) for name in names()}
    return [{"name": name, "about": document["about"]} for name, document in documents.items()]
