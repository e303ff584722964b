"""Whoever reads our output may leave before its end."""

from __future__ import annotations

import io
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from .errors import GATE_FAILED, UNREAD


@contextmanager
def read(stream: TextIO) -> Iterator[None]:
    """Libraries end a program that writes to a pipe which nobody reads with code 1. That means a failed gate here, so
    inside such an end has a code of its own. The pipe is kept by another name: they close the stream first."""
    try:
        pipe = os.dup(stream.fileno())
    except (OSError, io.UnsupportedOperation):
        yield
        return
    try:
        yield
    except SystemExit as end:
        raise SystemExit(UNREAD if end.code == GATE_FAILED and _abandoned(pipe) else end.code) from None
    finally:
        os.close(pipe)


def _abandoned(pipe: int) -> bool:
    asked = select.poll()
    asked.register(pipe, 0)
    return any(event & select.POLLERR for _, event in asked.poll(0))
