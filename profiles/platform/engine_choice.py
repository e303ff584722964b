"""The engine of another project that runs a scenario. Imports no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple


class EngineChoice(NamedTuple):
    """The engine's name (``profiles.engines.names``), the interpreter that runs it, and the folder with the wheels of
    releases."""

    name: str
    python: str = sys.executable
    wheels: Path = Path()
