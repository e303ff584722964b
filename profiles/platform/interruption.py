"""Interruptions that are lost where they are raised, and arrive again."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

# ``watch`` replaces Thread.start while a program runs. The timer below is not a thread of that program.
_start = threading.Thread.start


def send_again(number: int) -> None:
    """Send this process the signal a little later."""
    again = threading.Timer(0.02, os.kill, (os.getpid(), number))
    again.daemon = True
    _start(again)


def sending_lost(number: Callable[[], int]) -> Callable[[sys.UnraisableHookArgs], None]:
    """The ``sys.unraisablehook`` for a KeyboardInterrupt that is lost because it was raised in a callback of C code,
    such as that of a weak reference: the signal arrives again. ``number``: the signal, 0 where none has arrived."""
    report = sys.unraisablehook

    def lost(what: sys.UnraisableHookArgs) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt) and number():
            send_again(number())
        else:
            report(what)

    return lost
