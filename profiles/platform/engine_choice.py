"""The engine of another project that runs a scenario, and how its long preparations are shown. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, NamedTuple

TIMEOUT_S: Final = 300.0  # for an import, and between two signs of progress of a run

ShownWork = Callable[[str, float], AbstractContextManager[object]]
_shown: ShownWork = lambda text, seconds: nullcontext()  # noqa: E731, ARG005


def show_work(shown: ShownWork) -> None:
    """Choose what shows the preparations and the silence of engines in this process, by default nothing."""
    global _shown
    _shown = shown


def working(text: str, seconds: float = 0.0) -> AbstractContextManager[object]:
    """Shows the text, which is the work of the block. ``seconds``: what the work has taken before the block."""
    return _shown(text, seconds)


class EngineChoice(NamedTuple):
    """The engine's name (``profiles.engines.names``), the interpreter that runs it, the folder with the wheels of
    releases, and the seconds without progress after which the engine is ended."""

    name: str
    python: str = sys.executable
    wheels: Path = Path()
    timeout: float = TIMEOUT_S
