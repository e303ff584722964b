"""The garbage collector, kept out of a run's way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Objects made between two looks of the collector, while a run goes on.
YOUNG_OBJECTS: Final = 50_000


@contextmanager
def settled_heap() -> Iterator[None]:
    """Keep the garbage collector from walking torch's objects, and records that are about to go, again and again."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
