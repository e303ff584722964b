"""The runs of a check: one run that may crash, and several runs in worker processes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Protocol, TypeVar

from ...sched.relay.choice import RelayChoice
from ..platform.machine import MachineError
from ..platform.resolve import Resolved
from ..ranks.execute import Options, RunOutcome, execute
from ..run.compose import Guard
from ..run.crash import BrokenRunError, Crash, crash_of


def attempt(
    resolved: Resolved, relay: RelayChoice, options: Options, guard: Guard | None = None
) -> RunOutcome | Crash:
    """Execute a run and return its outcome, or how it crashed. Raises MachineError."""
    try:
        return execute(resolved, relay, options, guard=guard)
    except MachineError:
        raise
    except BrokenRunError as error:
        return crash_of(error.__cause__ or error)
    except Exception as error:
        return crash_of(error)


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
