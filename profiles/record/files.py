"""Files that somebody may read while we write them, or after we were killed."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast


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


@contextmanager
def packed_whole(path: Path, *, level: int = 6) -> Iterator[BinaryIO]:
    """As ``write_whole``, of what is written to the file inside the block: gzipped, and the same bytes for the same
    content. Nothing appears where the block raises."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as raw:
            with gzip.GzipFile("", "wb", level, raw, mtime=0) as file:
                yield cast(BinaryIO, file)
            raw.flush()
            os.fsync(raw.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
