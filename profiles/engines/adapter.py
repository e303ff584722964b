"""What an adapter defines, so that an engine's own scheduler can be run on the virtual GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final, Protocol

from ..run.system import System, SystemParts
from .names import EngineError


class EngineAdapter(Protocol):
    """Created in the engine's process before anything of the engine is imported. An adapter fits itself to the engine
    by inspection, and has no table of versions."""

    package: str  # what is imported
    python_path: str  # the folder of a checkout that holds the package
    environment: Mapping[str, str]  # variables that are set before anything is imported
    hollow: Sequence[str]  # packages that may be absent, and that no run depends on
    requires: Mapping[
        str, str
    ]  # modules that cannot be absent, with the requirement that pip installs them by

    def load(self) -> None:
        """Import all that a run needs of the engine."""

    def open(self, parts: SystemParts) -> System:
        """The engine's scheduler on the virtual GPU, which is open. Raises EngineError for what it cannot run."""


_ADAPTERS: Final[Mapping[str, str]] = {
    "sglang": "sglang.adapter",
    "mini-sglang": "mini_sglang",
    "nano-vllm": "nano_vllm",
}


def adapter_names() -> Sequence[str]:
    return tuple(_ADAPTERS)


def adapter_named(name: str) -> EngineAdapter:
    """Raises EngineError where there is none of that name."""
    if name not in _ADAPTERS:
        raise EngineError(f"there is no adapter for {name!r}: there is one for {', '.join(_ADAPTERS)}")
    adapter: EngineAdapter = import_module(f".{_ADAPTERS[name]}", __package__).ADAPTER
    return adapter
