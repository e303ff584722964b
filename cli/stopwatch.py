"""The ``run`` part of a document: when a command began, how it was typed, and how long it took."""

from __future__ import annotations

import shlex
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import Any


class Stopwatch:
    """``command`` is the command line as it was typed."""

    def __init__(self, command: str = "") -> None:
        self._command = command or command_line()
        self._started = datetime.now(UTC)
        self._began = time.perf_counter()

    def run(self, *, cancelled: bool = False) -> dict[str, Any]:
        return {
            "id": uuid.uuid4().hex,
            "command": self._command,
            "started": self._started.isoformat(timespec="seconds"),
            "wall_s": time.perf_counter() - self._began,
            "cancelled": cancelled,
        }


def command_line() -> str:
    return shlex.join(["schedbench", *sys.argv[1:]])
