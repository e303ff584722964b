"""Files that other processes may read while they are written, or after the writer was killed."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, cast

ENDING: Final = "perfetto.json.gz"  # of traces that are written, which are no captures


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old content or the new one, also after a crash of the machine.

    A killed process leaves a hidden file whose name ends in its process id. Raises OSError.
    """
    with replaced(path) as file:
        file.write(text.encode())


@contextmanager
def packed_whole(path: Path, *, level: int = 6) -> Iterator[BinaryIO]:
    """As ``write_whole``, for the bytes that the block writes, gzipped. Equal content gives equal bytes. No file
    appears where the block raises."""
    with replaced(path) as raw, gzip.GzipFile("", "wb", level, raw, mtime=0) as file:
        yield cast(BinaryIO, file)


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """As ``write_whole``, for the bytes that the block writes."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        if error.filename in (None, str(unfinished)):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        with suppress(OSError):  # it is not there, or cannot be removed
            unfinished.unlink()
