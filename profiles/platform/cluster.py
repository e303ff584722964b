"""A dask cluster as an executor (https://distributed.dask.org).

Tasks of a worker that ends run again on another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final

from ..record.environment import tool

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
        _require_usable(address, {name: worker["nthreads"] for name, worker in workers.items()})
        _require_alike(client.run(versions))
        executor = client.get_executor(pure=False)
        try:
            yield executor, len(workers)
        finally:
            executor.shutdown(wait=False)


def versions() -> tuple[str, str]:
    """What has to be the same everywhere for results to be."""
    return tool().model_dump_json(), version("torch")


def _require_usable(address: str, threads: Mapping[str, int]) -> None:
    if not threads:
        raise WorkersError(f"the cluster at {address} has no workers")
    for name, count in threads.items():
        if count > 1:
            raise WorkersError(
                f"{name} runs {count} tasks in one process, which has one virtual GPU: start workers with --nthreads 1"
            )


def _require_alike(found: Mapping[str, tuple[str, str]]) -> None:
    for name, theirs in found.items():
        if theirs != versions():
            raise WorkersError(f"{name} has another version: {theirs} instead of {versions()}")
