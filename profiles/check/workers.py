"""Processes for work that is independent of each other, as many as there are processors for this one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context


@contextmanager
def pool(tasks: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes: a virtual GPU belongs to the one that opened it. What is still to be done when the block is left
    early is not begun."""
    workers = ProcessPoolExecutor(max(1, min(processors(), tasks)), mp_context=get_context("spawn"))
    try:
        yield workers
    finally:
        workers.shutdown(cancel_futures=True)


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
