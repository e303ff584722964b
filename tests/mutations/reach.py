"""Runs schedbench and records which lines of sched/ are executed: ``reach.py ROOT FILE ARGS...``."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any


class Reached:
    """A trace function; ``lines`` are "file:line" relative to ``root``. Linked folders count as their targets."""

    def __init__(self, root: Path) -> None:
        self.lines: set[str] = set()
        self._root = root.resolve()
        self._names: dict[str, str] = {}

    def __call__(self, frame: FrameType, _event: str, _given: Any) -> Reached | None:
        name = self._name(frame.f_code.co_filename)
        if not name:
            return None
        self.lines.add(f"{name}:{frame.f_lineno}")
        return self

    def _name(self, file: str) -> str:
        if file not in self._names:
            path = Path(file).resolve()
            inside = path.is_relative_to(self._root / "sched")
            self._names[file] = path.relative_to(self._root).as_posix() if inside else ""
        return self._names[file]


def main() -> None:
    root, out, *arguments = sys.argv[1:]
    reached = Reached(Path(root))
    threading.settrace(reached)
    sys.settrace(reached)
    from schedbench.cli.app import main as schedbench

    sys.argv = ["schedbench", *arguments]
    try:
        schedbench()
    finally:
        Path(out).write_text(json.dumps(sorted(reached.lines)))


if __name__ == "__main__":
    main()
