"""Processes for work that is independent of each other, as many as there are processors for this one."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class MapFunction(Protocol):
    def __call__(self, function: Callable[[T], R], tasks: Iterable[T], /) -> Iterable[R]: ...


@contextmanager
def pool(tasks: int) -> Iterator[MapFunction]:
    """Fresh processes: a virtual GPU belongs to the one that opened it. What is still to be done when the block is left
    early is not begun."""
    workers = ProcessPoolExecutor(max(1, min(processors(), tasks)), mp_context=get_context("spawn"))

    def each(function: Callable[[T], R], tasks: Iterable[T], /) -> Iterable[R]:
        pickle.dumps(function)  # what cannot be: Python 3.11 would wait for it when the block is left
        return workers.map(function, tasks)

    try:
        yield each
    finally:
        workers.shutdown(cancel_futures=True)


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
