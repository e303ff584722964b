"""Python files of the user's that define a part of a run: a relay state, or the adapter of an engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from ...sched.relay.choice import RelayError
from ...sched.relay.names import ALIASES, STATE_NAMES
from ...sched.relay.states import State
from .raised_at import USER_MODULES


def imported(file: Path, kind: str) -> ModuleType:
    """The module that the file defines. Raises ImportError, whatever the file raises."""
    if not file.is_file():
        raise ImportError(f"{file}: no such file with {kind}")
    return _imported(file.resolve(), file.stat().st_mtime_ns)


@lru_cache
def _imported(file: Path, version: int) -> ModuleType:  # noqa: ARG001
    name = f"{USER_MODULES}{file}"  # files of one name differ by their folders
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # what the file defines is pickled and inspected by its module's name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ImportError(f"{file}: {type(error).__name__}: {error}") from error
    return module


@dataclass(frozen=True, slots=True)
class UserState(State):
    """A relay state that ``file`` defines. Another process reads the file again."""

    file: Path = Path()

    def __reduce__(self) -> Any:
        return user_state, (self.file, self.name)


def user_state(file: Path, name: str) -> UserState:
    """The state that the file defines under that name, which is its name in results. Raises RelayError."""
    try:
        found = getattr(imported(file, "a relay state"), name, None)
    except ImportError as error:
        raise RelayError(str(error)) from error
    if not isinstance(found, State):
        raise RelayError(f"{file}: {name} is no State of schedbench.sched.relay.states")
    if name in (*STATE_NAMES, *ALIASES):
        raise RelayError(f"{file}: {name} is the name of a shipped state")
    values = {field.name: getattr(found, field.name) for field in fields(State)}
    return UserState(**{**values, "name": name}, file=file.resolve())
