"""The engine of another project that runs a scenario, and how its long preparations are shown. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

ShownWork = Callable[[str], AbstractContextManager[object]]
_shown: ShownWork = nullcontext


def show_work(shown: ShownWork) -> None:
    """Choose what shows the preparations of engines in this process, by default nothing."""
    global _shown
    _shown = shown


def working(text: str) -> AbstractContextManager[object]:
    """Shows the text, which is the work of the block."""
    return _shown(text)


class EngineChoice(NamedTuple):
    """The engine's name (``profiles.engines.names``), the interpreter that runs it, and the folder with the wheels of
    releases."""

    name: str
    python: str = sys.executable
    wheels: Path = Path()
