"""Independent runs in new processes, as many at a time as there are processors."""

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
    """A map function over new processes, since a virtual GPU belongs to the process that opened it. Tasks that have not
    started when the block ends are cancelled."""
    workers = ProcessPoolExecutor(max(1, min(processors(), tasks)), mp_context=get_context("spawn"))

    def each(function: Callable[[T], R], tasks: Iterable[T], /) -> Iterable[R]:
        pickle.dumps(function)  # raises here; in a worker, Python 3.11 would hang at shutdown
        return workers.map(function, tasks)

    try:
        yield each
    finally:
        workers.shutdown(cancel_futures=True)


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
