"""YAML files of one kind, such as hardware profiles: those of a package, and the user's. A pydantic class validates
them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from .diagnosis import MISSING
from .document import MAX_BYTES, read
from .problems import ScenarioError, ScenarioSource, meant, show
from .shipped import names_in

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class YamlFiles(Generic[M]):
    """The files of ``package``, and the user's, which messages call by their ``kind``. ``model`` is the class of their
    content. All faults of a file are raised as one ``error``."""

    package: str
    kind: str
    model: type[M]
    error: type[ValueError]

    def names(self) -> list[str]:
        """Those of the package, in alphabetical order."""
        return names_in(files(self.package))

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
        """The validated ``content`` of ``file``. Each fault has its line, or that of the section around it."""
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
            faults = [
                (tuple(part for part in fault["loc"] if not str(part).startswith("function-")), fault)
                for fault in error.errors(include_url=False, include_input=False)
            ]
            for path, fault in faults:
                near = [
                    str(at[-1]) for at, one in faults if one["type"] == "missing" and at[:-1] == path[:-1]
                ]
                text = {"missing": MISSING, "extra_forbidden": f"unknown key{meant(path[-1], near)}"}
                said = fault["msg"].removeprefix("Value error, ")
                problems.append(source.problem(path, text.get(fault["type"], said)))
        if problems:
            raise self.error("\n".join(map(str, problems)))
        return found
