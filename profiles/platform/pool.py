"""Independent runs in new processes, as many at a time as there are processors."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from math import ceil
from multiprocessing import connection, forkserver, get_context, parent_process
from multiprocessing.context import BaseContext
from typing import Final, Protocol, TypeVar

from ..record.provenance import RunPart
from .own_process import claim_process

T = TypeVar("T")
R = TypeVar("R")

_IMPORTED: Final = ["schedbench.profiles.ranks.execute"]  # what every run imports
_START_S: Final = 6.0  # what the processes of a pool take to start
_ORPHANED: Final = 1  # exit code of a process whose parent has ended


class MapFunction(Protocol):
    def __call__(self, function: Callable[[T], R], tasks: Iterable[T], /) -> Iterable[R]: ...


def saves_time(tasks: int, run: RunPart) -> bool:
    """Whether that many runs like ``run`` end earlier in the processes of a pool than one after the other in this one.
    Each process imports an engine of another project itself."""
    at_once = max(1, min(processors(), tasks))
    return (tasks - ceil(tasks / at_once)) * run.wall_s > _START_S + (run.import_s or 0.0)


@contextmanager
def pool(tasks: int) -> Iterator[MapFunction]:
    """A map function over new processes, since a virtual GPU belongs to the process that opened it. Tasks that have not
    started when the block ends are cancelled. The processes end with this one, even where it is killed."""
    workers = ProcessPoolExecutor(max(1, min(processors(), tasks)), mp_context=_context(), initializer=_begin)

    def each(function: Callable[[T], R], tasks: Iterable[T], /) -> Iterable[R]:
        pickle.dumps(function)  # raises here; in a worker, Python 3.11 would hang at shutdown
        return workers.map(function, tasks)

    try:
        yield each
    finally:
        workers.shutdown(cancel_futures=True)


def prepare_pool() -> None:
    """Start what the processes of a pool are forked from, so that it imports while this process does something else."""
    _context()
    forkserver.ensure_running()


def _context() -> BaseContext:
    """Processes are forked from one that only imports, once for all pools of this process."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def _begin() -> None:
    """Begin in a new process. Freezing what it has imported keeps the garbage collector from walking it in each run."""
    end_with_parent()
    claim_process()
    gc.freeze()


def end_with_parent() -> None:
    """Make this process, which multiprocessing started, exit as soon as its parent has ended for any reason. A daemon
    thread waits for the end of a pipe whose other end only the parent has open."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(_ORPHANED)

    threading.Thread(target=watch, name="end_with_parent", daemon=True).start()


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
