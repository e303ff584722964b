"""How the process reacts to signals and to a closed stdout: with an exit code of its own."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final, TextIO

from .errors import GATE_FAILED, INTERRUPTED, TERMINATED, UNREAD

_HANDLED: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Interruption:
    """``number`` is the last signal that arrived, 0 before there is one."""

    number: int = 0

    def handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.number = number
        raise KeyboardInterrupt

    @property
    def exit_code(self) -> int:
        return TERMINATED if self.number == signal.SIGTERM else INTERRUPTED


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """SIGINT and SIGTERM raise KeyboardInterrupt inside, unless the process was started to ignore them. An interrupted
    block exits with the code of the signal, also where Typer has made 1 of it."""
    interruption = Interruption()
    before = {number: signal.getsignal(number) for number in _HANDLED}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in handled:
            signal.signal(number, interruption.handle)
        yield interruption
    except KeyboardInterrupt:
        raise SystemExit(interruption.exit_code) from None
    except SystemExit as end:
        marked = end.code == INTERRUPTED or (interruption.number and end.code == GATE_FAILED)
        raise SystemExit(interruption.exit_code if marked else end.code) from None
    finally:
        # After an interrupted exec of a string, python -m exits by SIGINT, unless another one follows.
        exec("")
        for number in handled:
            signal.signal(number, before[number])


def open_closed_streams() -> None:
    """Open the null device in place of the standard streams that were closed when the process started: what is printed
    is discarded, and files and exit codes are as ever. In this order each gets the number of the closed descriptor."""
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY))
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


@contextmanager
def closed_pipe_noticed(stream: TextIO) -> Iterator[None]:
    """Exits with UNREAD where the reader of ``stream`` has closed the pipe. Libraries exit with 1 then, which means a
    failed gate here. They also close the stream, hence the duplicate of its descriptor."""
    try:
        pipe = os.dup(stream.fileno())
    except (OSError, io.UnsupportedOperation):
        yield
        return
    try:
        yield
    except SystemExit as end:
        raise SystemExit(UNREAD if end.code == GATE_FAILED and _is_closed(pipe) else end.code) from None
    finally:
        os.close(pipe)


def _is_closed(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
