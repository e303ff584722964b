"""The names of engines as they are typed: ``sglang:../sglang@main``, ``sglang==0.5.23``, ``adapter.py:../engine``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ...scenarios.problems import meant

_ENGINE: Final = re.compile(r"(?P<adapter>[A-Za-z][\w-]*|[^=:{}]+\.py)(?:==(?P<version>.+)|:(?P<tree>.+))")
_CHOICES: Final = re.compile(r"\{([^{}]*)\}")


class PackagePlace(NamedTuple):
    """A package, and the folder inside a checkout that has it; a tree may also have it at its top."""

    package: str
    python_path: str

    @property
    def candidates(self) -> tuple[str, ...]:
        """The package's folder in a tree, in the order in which it is looked for."""
        inside = (Path(self.python_path) / self.package).as_posix()
        return tuple(dict.fromkeys((inside, self.package)))

    def inside(self, tree: Path) -> Path | None:
        """The folder to put on the import path, if the tree has the package."""
        return next((found.parent for at in self.candidates if any((found := tree / at).glob("*.py"))), None)

    def is_in_its_place(self, path: Path) -> bool:
        """Whether the package in ``path`` is in the folder of that name; a package whose place is the top always is."""
        name = Path(self.python_path).name
        return not name or path.name == name


# The engines of the shipped adapters. These are modules beside this one, which import torch.
ADAPTERS: Final[Mapping[str, PackagePlace]] = {
    "sglang": PackagePlace("sglang", "python"),
    "mini-sglang": PackagePlace("minisgl", "python"),
    "nano-vllm": PackagePlace("nanovllm", ""),
    "vllm": PackagePlace("vllm", ""),
}


class EngineError(RuntimeError):
    """An engine cannot be run as it was asked for."""


class EngineNameError(EngineError):
    """The name has no engine's form, or there is no adapter of that name."""


def require_shipped(name: str) -> None:
    """Raises EngineNameError where no adapter of that name is shipped."""
    if name not in ADAPTERS:
        known = f"{', '.join(ADAPTERS)}{meant(name, ADAPTERS)}"
        raise EngineNameError(f"there is no adapter for {name!r}: there is one for {known}")


@dataclass(frozen=True, slots=True)
class EngineName:
    """``adapter`` is the name of a shipped adapter, or the path of the file that defines one. The engine is a release,
    ``version``, or the folder ``tree``, as it stands or at the git ``ref``."""

    adapter: str
    tree: str = ""
    ref: str | None = None
    version: str | None = None

    def __str__(self) -> str:
        if self.version is not None:
            return f"{self.adapter}=={self.version}"
        return f"{self.adapter}:{self.tree}{'' if self.ref is None else f'@{self.ref}'}"


def adapter_of(folder: Path) -> str:
    """The adapter whose package is in the folder, as in a checkout or a wheel; SGLang's without any."""
    return next((name for name, place in ADAPTERS.items() if place.inside(folder)), "sglang")


def is_engine(text: str) -> bool:
    """Whether the text has the form of an engine's name."""
    return _ENGINE.fullmatch(text.strip()) is not None


def parse_engine(text: str) -> EngineName:
    """``@`` begins a ref unless a folder of the whole name exists. Raises EngineNameError."""
    found = _ENGINE.fullmatch(text.strip())
    if found is None:
        place = Path(text.partition("@")[0]).expanduser()
        such = f", such as {adapter_of(place)}:{text}" if place.is_dir() else ""
        raise EngineNameError(
            f"{text!r} is no engine: expected NAME:FOLDER, NAME:FOLDER@REF or NAME==VERSION{such}"
        )
    adapter, version, tree = found.group("adapter", "version", "tree")
    if version is not None:
        return EngineName(adapter, version=version)
    folder, at, ref = tree.rpartition("@")
    if not at or not folder or Path(tree).expanduser().exists():
        return EngineName(adapter, tree)
    if not ref:
        raise EngineNameError(f"{text!r}: a commit, branch or tag is missing after @")
    return EngineName(adapter, folder, ref)


def expanded(text: str) -> Sequence[str]:
    """The names that ``text`` stands for, one for each choice in braces: ``sglang:../sglang@{main,fix}``."""
    choices = _CHOICES.search(text)
    if choices is None:
        return (text,)
    before, after = text[: choices.start()], text[choices.end() :]
    return [
        name
        for choice in choices.group(1).split(",")
        for name in expanded(f"{before}{choice.strip()}{after}")
    ]
