"""Independent runs, spread over processes of this machine or over a dask cluster: the one way in which commands run
things side by side.

A task whose process ends abruptly runs again in another process; on a cluster, on another worker
(https://distributed.dask.org).
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import islice
from math import ceil, inf
from multiprocessing import Pipe, connection, forkserver, get_context, parent_process, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from traceback import format_exc
from types import ModuleType
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar, cast

import psutil

from ..record.environment import tool
from .own_process import between_runs, claim_process, freeze_heap

T = TypeVar("T")
R = TypeVar("R")
Lost = Callable[[str], Any]

_PRELOADED: Final = ["schedbench.profiles.platform.forked"]  # imports all that a run needs
_START_S: Final = 6.0  # what the processes of a pool take to start
# Tasks submitted for each process: none waits for the next, and few results wait to be read.
_AHEAD: Final = 4
# The longest wait in one piece: a signal that arrives just before it may be handled only after it.
_LISTEN_S: Final = 0.5
_ENDED: Final = (
    "a worker process ended abruptly, and so did another where the task ran again: by a signal or a crash (where memory"
    " ran out, fewer --jobs help)"
)


class Workers(NamedTuple):
    """Where independent runs happen: in so many processes of this machine at a time, None for as many as it has
    processors, or on the cluster whose scheduler has that address."""

    jobs: int | None = None
    cluster: str = ""


_workers = Workers()
_clients: list[Any] = []  # of the cluster, once for each time that it was used


def use_workers(workers: Workers) -> None:
    """Choose the workers of all pools of this process."""
    global _workers
    _workers = workers
    _clients.clear()


def uses_cluster() -> bool:
    return bool(_workers.cluster)


def cluster_is_idle() -> bool:
    """Whether a cluster was chosen and this process has run nothing there."""
    return uses_cluster() and not _clients


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
def spread(
    tasks: int, seconds: float, import_s: float | None = None, lost: Lost | None = None
) -> Iterator[MapFunction]:
    """A map function: over a pool where ``saves_time``, else over this process."""
    if not saves_time(tasks, seconds, import_s):
        yield map
        return
    with pool(tasks, lost) as each:
        yield each


@contextmanager
def pool(tasks: int, lost: Lost | None = None) -> Iterator[MapFunction]:
    """A map function over new processes, since a virtual GPU belongs to the process that opened it, or over a cluster.
    Results come in the order of the tasks. Tasks that have not started when the block ends are cancelled. The processes
    end with this one, even where it is killed. A task whose process ended abruptly in both of its runs has the result
    that ``lost`` makes of the reason; without it, raises WorkersError."""
    between_runs()
    opened = cluster(_workers.cluster) if uses_cluster() else _processes_of(tasks)
    with opened as (executor, at_once):

        def each(function: Callable[[T], R], tasks: Iterable[T], /) -> Iterable[R]:
            waiting = iter(tasks)
            started = deque(executor.submit(function, task) for task in islice(waiting, _AHEAD * at_once))
            return _results(executor, function, started, waiting, lost or _refused)

        yield each


@contextmanager
def _processes_of(tasks: int) -> Iterator[tuple[Executor, int]]:
    at_once = max(1, min(_at_once(), tasks))
    executor = _ProcessPerThread(at_once)
    try:
        yield executor, at_once
    except BaseException:  # without waiting for what is running
        executor.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


class _ProcessPerThread(ThreadPoolExecutor):
    """Each thread runs its tasks in one process of its own. Where that process ends abruptly, its task runs once more
    in a new process, and no other task is affected. Threads start the processes, because signals interrupt only the
    main thread and therefore no start. Only the process has the other end of its pipe open. The pipe therefore closes
    when the process ends, even in the middle of a result; a ProcessPoolExecutor would wait for the rest for ever."""

    def __init__(self, at_once: int) -> None:
        super().__init__(at_once)
        self._own = threading.local()
        self._opened: list[tuple[BaseProcess, connection.Connection]] = []
        self._killed = threading.Event()

    def submit(self, function: Callable[..., R], /, *task: Any) -> Future[R]:  # type: ignore[override]
        return super().submit(self._run, function, *task)

    def _run(self, function: Callable[..., R], *task: Any) -> R:
        try:
            return self._attempt(function, *task)
        except BrokenProcessPool:
            return self._attempt(function, *task)

    def _attempt(self, function: Callable[..., R], *task: Any) -> R:
        try:
            pipe = self._pipe()
        except (EOFError, ConnectionError):
            raise BrokenProcessPool from None
        except OSError as reason:
            raise WorkersError(f"a worker process could not start: {reason.strerror or reason}") from None
        try:
            pipe.send((function, task))
            error, result = pipe.recv()
        except (EOFError, OSError):
            self._own.__dict__.clear()
            raise BrokenProcessPool from None
        if error is not None:
            raise error
        return cast(R, result)

    def _pipe(self) -> connection.Connection:
        """To the thread's process, which starts with its first task. Raises EOFError or ConnectionError where the
        process that it is forked from has been killed."""
        if not hasattr(self._own, "pipe"):
            with _starting, _main_hidden():
                if self._killed.is_set():
                    raise EOFError
                ours, theirs = Pipe()
                with theirs:
                    process = _context().Process(target=_serve, args=(theirs,))
                    process.start()
                self._opened.append((process, ours))
                self._own.pipe = ours
            if self._killed.is_set():  # while it started: the first call may have missed it
                self.kill()
        return cast(connection.Connection, self._own.pipe)

    def kill(self) -> None:
        """End the processes; and, while a thread starts one, the fork server, which may still be importing."""
        self._killed.set()
        for process, _ in list(self._opened):
            if process.is_alive():  # the number of another one may be in use again
                process.kill()
        for child in psutil.Process().children() if _starting.locked() else ():
            if any(forkserver.__name__ in word for word in child.cmdline()):
                child.kill()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        for _, pipe in self._opened:
            pipe.close()  # which ends its process
        for process, _ in self._opened:
            process.join()


def _serve(pipe: connection.Connection) -> None:
    """The program of a process: its tasks, until the other end of the pipe is closed."""
    end_with_parent()
    claim_process()
    freeze_heap()
    with suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(_outcome(pipe.recv_bytes()))


def _outcome(message: bytes) -> bytes:
    """The task's error, None without one, and its result. The error has its traceback as a note."""
    try:
        function, task = pickle.loads(message)
        return pickle.dumps((None, function(*task)))
    except BaseException as error:
        error.add_note(format_exc())
        return pickle.dumps((error, None))


_starting = threading.Lock()


@contextmanager
def _main_hidden() -> Iterator[None]:
    """A process that starts inside does not import the main module of this one: it may be a script that calls the
    Python interface without a guard, and would run again in each."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _results(
    executor: Executor,
    function: Callable[[T], R],
    started: deque[Future[R]],
    waiting: Iterator[T],
    lost: Lost,
) -> Iterator[R]:
    """The results in order. A task is submitted for each result that is read. ``lost``: as of ``pool``. Raises
    WorkersError where the scheduler of the cluster ends, which cancels all tasks."""
    waiting_is_said = False
    while started:
        while not wait([started[0]], _LISTEN_S).done:  # signals are handled between two waits
            waiting_is_said = waiting_is_said or _without_workers()
        try:
            result = started.popleft().result()
        except _abrupt_ends():
            result = lost(_ENDED)
        except CancelledError:
            raise WorkersError(f"the dask scheduler at {_workers.cluster} has ended") from None
        started.extend(executor.submit(function, task) for task in islice(waiting, 1))
        yield result


def _without_workers() -> bool:
    """Whether all workers of the cluster have ended, which is then said on stderr: its tasks wait for new ones."""
    if not uses_cluster() or _clients[-1].scheduler_info(n_workers=1)["workers"]:
        return False
    logging.getLogger(__name__).warning(
        f"schedbench: no worker is left at {_workers.cluster}: waiting for one"
    )
    return True


def _abrupt_ends() -> type[Exception]:
    """The error of a task whose process ended abruptly in each of its attempts."""
    if not uses_cluster():
        return BrokenProcessPool
    from distributed import KilledWorker

    return KilledWorker


def _refused(reason: str) -> NoReturn:
    raise WorkersError(reason) from None


def prepare_pool() -> None:
    """Start what the processes of a pool are forked from, so that it imports while this process does something else."""
    if not uses_cluster():
        _context()


def _context() -> ForkServerContext:
    """Processes are forked from one that only imports, once for all pools of this process. It and they start with
    SIGINT blocked: Ctrl-C, which a terminal sends to all processes, is for this one, which ends them."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    resource_tracker.ensure_running()  # whose start would unblock it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context


def end_with_parent() -> None:
    """Make this process, which multiprocessing started, exit as soon as its parent has ended for any reason. A daemon
    thread waits for the end of a pipe whose other end only the parent has open."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

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
        from distributed.comm.addressing import get_address_host_port
    except ImportError:
        raise WorkersError("--executor dask:ADDRESS needs pip install 'schedbench[cluster]'") from None
    connect, parse = cast(Any, distributed.Client), cast(Any, get_address_host_port)  # which have no types
    try:
        parse(address)  # a client with an invalid address would end only after a timeout
        client = connect(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise WorkersError(f"no dask scheduler at {address}: {error}") from None
    _clients.append(client)
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
