"""Ranks as processes of torch.distributed: started here on one machine, or by torchrun on as many as one likes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Final, NamedTuple, TypeVar

import torch.distributed as dist

from ...sched.link import Link, LinkError
from ..result import Result
from ..run.machine import MachineError
from ..run.machines import open_port
from ..run.perils import Perils
from ..run.resolve import Resolved
from ..run.runner import Valve
from .process_link import ProcessLink
from .ranks import Assembly, Body, Told

T = TypeVar("T", bound=Told)
PATIENCE: Final = 120.0  # seconds that a rank waits for another
RESULT: Final = "result"
_LOCAL: Final = "127.0.0.1"
_GRACE: Final = 5.0  # seconds in which a process ends by itself


class Place(NamedTuple):
    """A process among others, and where they meet."""

    rank: int
    size: int
    host: str
    port: int


def launched() -> Place | None:
    """What torchrun, or whoever starts processes as it does, has told this one."""
    told = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    if None in told:
        return None
    rank, size, host, port = (str(word) for word in told)
    return Place(int(rank), int(size), host, int(port))


def here(ranks: int) -> list[Place]:
    """Places for that many processes of this machine."""
    with socket.socket() as free:
        free.bind((_LOCAL, 0))
        port = free.getsockname()[1]
    return [Place(rank, ranks, _LOCAL, port) for rank in range(ranks)]


def process_world(
    resolved: Resolved,
    hazards: bool,
    adversary: int | None,
    body: Body[T],
    child: Body[T],
    assembly: Assembly[T],
) -> Result:
    """One process per rank; this one is the first, or what torchrun says, and others of this machine do as ``child``.

    Raises MachineError, LinkError; SystemExit in a process whose result another one tells.
    """
    ranks, place = resolved.scenario.engine.ranks, launched()
    if place is not None:
        return _as_launched(place, ranks, resolved, hazards, adversary, body, assembly)
    places = here(ranks)
    with _children(places[1:], (resolved, hazards, adversary, child, assembly)) as others:
        try:
            result = run_place(places[0], "tcp", resolved, hazards, adversary, body, assembly)
        except LinkError as error:
            raise LinkError(f"{error}{_fates(others)}") from None
    assert result is not None
    return result


def _as_launched(
    place: Place,
    ranks: int,
    resolved: Resolved,
    hazards: bool,
    adversary: int | None,
    body: Body[T],
    assembly: Assembly[T],
) -> Result:
    if place.size != ranks:
        raise MachineError(f"{place.size} processes were started, and the scenario has {ranks} ranks")
    result = run_place(place, "env", resolved, hazards, adversary, body, assembly)
    if result is None:
        raise SystemExit(0)
    return result


def run_place(
    place: Place,
    meeting: str,
    resolved: Resolved,
    hazards: bool,
    adversary: int | None,
    body: Body[T],
    assembly: Assembly[T],
) -> Result | None:
    """This process's rank; the first one's result has everybody's."""
    dist.init_process_group(
        "gloo",
        init_method="env://" if meeting == "env" else f"tcp://{place.host}:{place.port}",
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=PATIENCE),
    )
    try:
        valve = Valve()
        with open_port(resolved, valve, hazards=hazards, adversary=adversary) as (machine, ports):
            link = ProcessLink(ports, machine.clock, patience=PATIENCE)
            perils = Perils(resolved.scenario, place.rank, _kill) if resolved.scenario.faults else None
            way = perils.around(link) if perils else link
            run = body(machine, valve, assembly.seat(resolved, way)._replace(perils=perils))
            if run.result.run.failure is not None:
                raise LinkError(run.result.run.failure)
            whole = _gathered(resolved, link, run, assembly)
            link.close()
        return whole
    finally:
        dist.destroy_process_group()


def _kill(how: str) -> None:  # noqa: ARG001
    os.kill(os.getpid(), signal.SIGKILL)


def _gathered(resolved: Resolved, link: Link, run: T, assembly: Assembly[T]) -> Result | None:
    if link.rank:
        link.send(0, RESULT, run)
        return None
    others = [link.receive(rank, RESULT).value for rank in range(1, link.size)]
    return assembly.join(resolved, [run, *others])


@contextmanager
def _children(places: Sequence[Place], task: tuple[object, ...]) -> Iterator[list[BaseProcess]]:
    """Fresh processes, gone when the block ends."""
    context = get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=_child, args=(place, *task), daemon=True) for place in places
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.join(_GRACE)
            if process.is_alive():
                process.terminate()
                process.join()


def _child(
    place: Place,
    resolved: Resolved,
    hazards: bool,
    adversary: int | None,
    body: Body[T],
    assembly: Assembly[T],
) -> None:
    run_place(place, "tcp", resolved, hazards, adversary, body, assembly)


def _fates(processes: Sequence[BaseProcess]) -> str:
    """What became of the others, where they did not end well."""
    for process in processes:
        process.join(_GRACE)
    told = [
        f"rank {rank} ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"
        for rank, process in enumerate(processes, 1)
        if (code := process.exitcode)
    ]
    return "".join(f"; {line}" for line in told)
