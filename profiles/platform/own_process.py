"""Which processes run nothing but this program, and may therefore change torch permanently."""

from __future__ import annotations

import gc
from typing import Final

# Objects made between two collections of the youngest generation.
YOUNG_OBJECTS: Final = 50_000
_claimed = False
_frozen = False


def claim_process() -> None:
    """Declare that no other program's code runs in this process. Called where a process begins. Imports make many
    objects that stay, so that nothing is collected until the first run: it would take a tenth of torch's import."""
    global _claimed
    _claimed = True
    gc.disable()


def freeze_heap() -> None:
    """Keep the garbage collector from walking again what exists now, which is to stay. In a claimed process collections
    begin, and are rare."""
    global _frozen
    gc.freeze()
    if _claimed:
        gc.set_threshold(YOUNG_OBJECTS)
        gc.enable()
    _frozen = True


def is_frozen() -> bool:
    """Whether ``freeze_heap`` was called. ``gc.get_freeze_count`` would count all objects for it."""
    return _frozen


def between_runs() -> None:
    """Freeze what a claimed process has imported, compiled and kept, before each run, or before others run for it. Only
    what a run before it has left is garbage."""
    if _claimed:
        if _frozen:
            gc.collect()
        freeze_heap()


def is_claimed() -> bool:
    return _claimed
