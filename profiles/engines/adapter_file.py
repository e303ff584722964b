"""Finds the adapter of an engine: a shipped one by its name, or one that a file of the user's defines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ..platform.user_files import imported
from .adapter import EngineAdapter, adapter_named
from .names import EngineError

_DEFINED: Final = "ADAPTER"
_FACTS: Final = ("package", "python_path", "environment", "hollow", "requires", "load", "open")


def find_adapter(name: str) -> EngineAdapter:
    """Imports nothing of the engine. Raises EngineError."""
    if not name.endswith(".py"):
        return adapter_named(name)
    adapter = _defined_in(Path(name).expanduser().resolve())
    missing = [fact for fact in _FACTS if not hasattr(adapter, fact)]
    if missing:
        raise EngineError(f"{name}: {_DEFINED} has no {', no '.join(missing)}")
    found: EngineAdapter = adapter
    return found


def _defined_in(file: Path) -> Any:
    try:
        module = imported(file, "an adapter")
    except ImportError as error:
        raise EngineError(str(error)) from error
    if not hasattr(module, _DEFINED):
        raise EngineError(f"{file}: defines no {_DEFINED}")
    return getattr(module, _DEFINED)
