"""Files that somebody may read while we write them, or after we were killed."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all: whoever looks sees the old content or the new one, after a crash of the machine as well.

    What a killed process leaves behind is hidden, ends in its number, and is in nobody's way. Raises OSError.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
