"""Independent runs, spread over processes of this machine or over a dask cluster: the one way in which commands run
things side by side.

Tasks of a cluster's worker that ends run again on another (https://distributed.dask.org).
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.metadata import version
from itertools import islice
from math import ceil, inf
from multiprocessing import active_children, connection, forkserver, get_context, parent_process
from multiprocessing.context import BaseContext
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import psutil

from ..record.environment import tool
from .own_process import claim_process, freeze_heap

T = TypeVar("T")
R = TypeVar("R")

_PRELOADED: Final = ["schedbench.profiles.platform.forked"]  # imports all that a run needs
_START_S: Final = 6.0  # what the processes of a pool take to start
# Tasks submitted for each process: none waits for the next, and few results wait to be read.
_AHEAD: Final = 4
_ORPHANED: Final = 1  # exit code of a process whose parent has ended


class Workers(NamedTuple):
    """Where independent runs happen: in so many processes of this machine at a time, None for as many as it has
    processors, or on the cluster whose scheduler has that address."""

    jobs: int | None = None
    cluster: str = ""


_workers = Workers()


def use_workers(workers: Workers) -> None:
    """Choose the workers of all pools of this process."""
    global _workers
    _workers = workers


def uses_cluster() -> bool:
    return bool(_workers.cluster)


def require_alone(measured: str) -> None:
    """Raises MeasuredAloneError where workers were chosen and times are measured, for the reason given."""
    if measured and (uses_cluster() or (_workers.jobs or 1) > 1):
        option = "--executor" if uses_cluster() else f"--jobs {_workers.jobs}"
        raise MeasuredAloneError(f"{option}: a measured run shares no machine with other runs: {measured}")


class MapFunction(Protocol):
    def __call__(self, function: Callable[[T], R], tasks: Iterable[T], /) -> Iterable[R]: ...


def saves_time(tasks: int, seconds: float, import_s: float | None = None) -> bool:
    """Whether that many runs of so many seconds end earlier in the processes of a pool than one after the other in this
    one. Each process imports an engine of another project itself, in ``import_s``."""
    return uses_cluster() or seconds > pays_from(tasks, import_s)


def pays_from(tasks: int, import_s: float | None = None) -> float:
    """The seconds above which a run has to take for processes of this machine to save time, as in ``saves_time``;
    infinite where they never do."""
    at_once = max(1, min(_at_once(), tasks))
    saved = tasks - ceil(tasks / at_once)
    return (_START_S + (import_s or 0.0)) / saved if saved else inf


@contextmanager
def spread(tasks: int, seconds: float, import_s: float | None = None) -> Iterator[MapFunction]:
    """A map function: over a pool where ``saves_time``, else over this process."""
    if not saves_time(tasks, seconds, import_s):
        yield map
        return
    with pool(tasks) as each:
        yield each


@contextmanager
def pool(tasks: int) -> Iterator[MapFunction]:
    """A map function over new processes, since a virtual GPU belongs to the process that opened it, or over a cluster.
    Results come in the order of the tasks. Tasks that have not started when the block ends are cancelled. The processes
    end with this one, even where it is killed. Raises WorkersError."""
    opened = cluster(_workers.cluster) if uses_cluster() else _processes_of(tasks)
    with opened as (executor, at_once):

        def each(function: Callable[[T], R], tasks: Iterable[T], /) -> Iterable[R]:
            pickle.dumps(function)  # raises here; in a worker, Python 3.11 would hang at shutdown
            waiting = iter(tasks)
            started = deque(_submit(executor, function, islice(waiting, _AHEAD * at_once)))
            return _results(executor, function, started, waiting)

        yield each


@contextmanager
def _processes_of(tasks: int) -> Iterator[tuple[Executor, int]]:
    at_once = max(1, min(_at_once(), tasks))
    executor = ProcessPoolExecutor(at_once, mp_context=_context(), initializer=_begin)
    others = active_children()
    try:
        yield executor, at_once
    except BaseException:  # without waiting for what is running
        for process in active_children():
            if process not in others:
                process.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _results(
    executor: Executor, function: Callable[[T], R], started: deque[Future[R]], waiting: Iterator[T]
) -> Iterator[R]:
    """The results in order. A task is submitted for each one that is read. Raises WorkersError."""
    while started:
        with _abrupt_ends_named():
            result = started.popleft().result()
        started.extend(_submit(executor, function, islice(waiting, 1)))
        yield result


@contextmanager
def _abrupt_ends_named() -> Iterator[None]:
    """Neither a result nor a new task is possible once a process of the pool has ended. Raises WorkersError."""
    try:
        yield
    except BrokenProcessPool:
        raise WorkersError(
            "a worker process ended abruptly, by a signal or a crash (where memory ran out, fewer --jobs help)"
        ) from None


def _submit(executor: Executor, function: Callable[[T], R], tasks: Iterable[T]) -> list[Future[R]]:
    """The processes that start meanwhile do not import the main module of this one: it may be a script that calls the
    Python interface without a guard, and would run again in each. Raises WorkersError."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        with _abrupt_ends_named():
            return [executor.submit(function, task) for task in tasks]
    finally:
        sys.modules["__main__"] = main


def prepare_pool() -> None:
    """Start what the processes of a pool are forked from, so that it imports while this process does something else."""
    if not uses_cluster():
        _context()
        forkserver.ensure_running()


def _context() -> BaseContext:
    """Processes are forked from one that only imports, once for all pools of this process."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _begin() -> None:
    """Begin in a new process."""
    end_with_parent()
    claim_process()
    freeze_heap()


def end_with_parent() -> None:
    """Make this process, which multiprocessing started, exit as soon as its parent has ended for any reason. A daemon
    thread waits for the end of a pipe whose other end only the parent has open."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(_ORPHANED)

    threading.Thread(target=watch, name="end_with_parent", daemon=True).start()


def _at_once() -> int:
    """The number of processes that may run at a time. Each is assumed to need as much memory as this one has now."""
    fitting = psutil.virtual_memory().available // psutil.Process().memory_info().rss
    return min(_workers.jobs or processors(), fitting)


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_CONNECT_S: Final = 10


class WorkersError(ValueError):
    """The workers that were named are not there, or cannot run what this process runs."""


class MeasuredAloneError(WorkersError):
    """Workers were chosen for runs whose times are measured."""


@contextmanager
def cluster(address: str) -> Iterator[tuple[Executor, int]]:
    """The executor of the cluster whose scheduler has that address, and its number of workers. What was submitted and
    has not ended is cancelled at the end. Raises WorkersError."""
    try:
        import distributed
    except ImportError:
        raise WorkersError("--executor dask:ADDRESS needs pip install 'schedbench[cluster]'") from None
    connect: Any = distributed.Client  # which has no types
    try:
        client = connect(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise WorkersError(f"no dask scheduler at {address}: {error}") from None
    with client:
        workers: Mapping[str, Mapping[str, Any]] = client.scheduler_info(n_workers=-1)["workers"]
        if not workers:
            raise WorkersError(f"the cluster at {address} has no workers")
        for name, worker in workers.items():
            if (count := worker["nthreads"]) > 1:
                raise WorkersError(
                    f"{name} runs {count} tasks in one process, which has one virtual GPU: start workers with"
                    " --nthreads 1"
                )
        for name, theirs in client.run(versions).items():
            if theirs != versions():
                raise WorkersError(f"{name} has another version: {theirs} instead of {versions()}")
        executor = client.get_executor(pure=False)
        try:
            yield executor, len(workers)
        finally:
            executor.shutdown(wait=False)


def versions() -> tuple[str, str]:
    """What has to be the same everywhere for results to be."""
    return tool().model_dump_json(), version("torch")
