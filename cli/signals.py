"""Being asked to end is answered like Ctrl-C: what there is is kept, and marked."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from .errors import INTERRUPTED, TERMINATED


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM interrupts what is done inside; an end as interrupted is then one as terminated."""
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except SystemExit as end:
        raise SystemExit(TERMINATED if asked and end.code == INTERRUPTED else end.code) from None
    finally:
        signal.signal(signal.SIGTERM, before)
