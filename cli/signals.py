"""Ctrl-C, and being told to end, are answered alike: what there is is kept, and marked."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final

from .errors import INTERRUPTED, TERMINATED

_ANSWERED: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Interruption:
    """The last signal that came; 0 before there is one."""

    number: int = 0

    def came(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.number = number
        raise KeyboardInterrupt

    @property
    def exit_code(self) -> int:
        return TERMINATED if self.number == signal.SIGTERM else INTERRUPTED


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Both signals raise KeyboardInterrupt inside, unless the process was started to ignore them. An end as interrupted
    has the exit code of the signal."""
    interruption = Interruption()
    before = {number: signal.getsignal(number) for number in _ANSWERED}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in heeded:
            signal.signal(number, interruption.came)
        yield interruption
    except KeyboardInterrupt:
        raise SystemExit(interruption.exit_code) from None
    except SystemExit as end:
        raise SystemExit(interruption.exit_code if end.code == INTERRUPTED else end.code) from None
    finally:
        for number in heeded:
            signal.signal(number, before[number])
