"""Finds the adapter of an engine: a shipped one by its name, or one that a file of the user's defines."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

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
    if not file.is_file():
        raise EngineError(f"{file}: no such file with an adapter")
    name = f"schedbench_adapter_{file.stem}"
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # what the file defines is pickled and inspected by its module's name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise EngineError(f"{file}: {type(error).__name__}: {error}") from error
    if not hasattr(module, _DEFINED):
        raise EngineError(f"{file}: defines no {_DEFINED}")
    return getattr(module, _DEFINED)
