"""Ranks as processes of torch.distributed: started here on one machine, or by torchrun on as many as one likes."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol

import torch.distributed as dist

from ...sched.link import Link, LinkError
from ..record.result import Result
from ..run.machines import OpenedRank
from ..run.runner import GatedSink
from .carriers import Carrier
from .process_link import ProcessLink

PATIENCE: Final = 120.0  # seconds that a rank waits for another
RESULT: Final = "result"
_LOCAL: Final = "127.0.0.1"
_GRACE: Final = 5.0  # seconds in which a process ends by itself
_GLANCE: Final = 0.2  # seconds between two looks at processes that are starting
_EARLY: Final = 1  # exit code of a process that ended before its work was done
END: Final = getattr(signal, "SIGUSR1", signal.SIGTERM)  # by which the first process tells the others to end


class PlacesError(ValueError):
    """More processes than ranks, or fewer."""


class ProcessAddress(NamedTuple):
    """A process among others, and where they meet."""

    rank: int
    size: int
    host: str
    port: int


def launched() -> ProcessAddress | None:
    """What torchrun, or whoever starts processes as it does, has told this one."""
    told = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    if None in told:
        return None
    rank, size, host, port = (str(word) for word in told)
    return ProcessAddress(int(rank), int(size), host, int(port))


def here(ranks: int) -> list[ProcessAddress]:
    """Places for that many processes of this machine."""
    with socket.socket() as free:
        free.bind((_LOCAL, 0))
        port = free.getsockname()[1]
    return [ProcessAddress(rank, ranks, _LOCAL, port) for rank in range(ranks)]


class RankGroup(Protocol):
    """What the processes of a run do, each its part. It travels to those that are started."""

    @property
    def names(self) -> Sequence[str]:
        """Of the ranks, one process each."""

    def carrier(self, port: OpenedRank, rank: int, *, patience: float) -> Carrier:
        """How tensors travel; all ranks ask. Raises MachineError."""

    def opened(self, rank: int, gate: GatedSink) -> AbstractContextManager[OpenedRank]:
        """What that rank works on. Raises MachineError."""

    def act(self, port: OpenedRank, gate: GatedSink, link: Link) -> Any:
        """Do a rank's part; what it has to tell, which travels to the first one."""

    def whole(self, told: Sequence[Any]) -> Result:
        """Of all that was told, by rank."""


def process_world(rank_group: RankGroup, others: RankGroup) -> Result:
    """One process per rank; this one is the first, or what torchrun says, and others of this machine do as ``others``
    say.

    Raises PlacesError, MachineError, LinkError; SystemExit in a process whose result another one tells.
    """
    place = launched()
    if place is not None:
        return _as_launched(place, rank_group)
    places = here(len(rank_group.names))
    with _children(places[1:], others) as (processes, ready), _told_to_end(processes) as told:
        try:
            _await(processes, ready)
            result = run_place(places[0], "tcp", rank_group)
        except LinkError as error:
            if told.is_set():  # others had nothing yet that they could have kept
                raise KeyboardInterrupt from None
            raise LinkError(f"{error}{_fates(processes, rank_group.names)}") from None
    assert result is not None
    return result


def _as_launched(place: ProcessAddress, rank_group: RankGroup) -> Result:
    if place.size != len(rank_group.names):
        raise PlacesError(
            f"{place.size} processes were started, and the scenario has {len(rank_group.names)} ranks"
            f" ({', '.join(rank_group.names)}): torchrun --nproc-per-node {len(rank_group.names)} on one machine"
        )
    result = run_place(place, "env", rank_group)
    if result is None:
        raise SystemExit(0)
    return result


def run_place(place: ProcessAddress, meeting: str, rank_group: RankGroup) -> Result | None:
    """This process's rank; the first one's result has everybody's."""
    dist.init_process_group(
        "gloo",
        init_method="env://" if meeting == "env" else f"tcp://{place.host}:{place.port}",
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=PATIENCE),
    )
    try:
        gate = GatedSink()
        with rank_group.opened(place.rank, gate) as port, _linked(port, rank_group, place.rank) as link:
            return _gathered(link, rank_group.act(port, gate, link), rank_group)
    finally:
        dist.destroy_process_group()


def _linked(port: OpenedRank, rank_group: RankGroup, rank: int) -> ProcessLink:
    carrier = rank_group.carrier(port, rank, patience=PATIENCE)
    return ProcessLink(rank_group.names, port.ports, port.clock, patience=PATIENCE, carrier=carrier)


def _gathered(link: Link, own: Any, rank_group: RankGroup) -> Result | None:
    if link.rank:
        link.send(0, RESULT, own)
        return None
    return rank_group.whole([own, *(link.receive(rank, RESULT).value for rank in range(1, link.size))])


@contextmanager
def _told_to_end(processes: Sequence[BaseProcess]) -> Iterator[Event]:
    """Whoever tells this process to end, tells the others: they leave Ctrl-C to it, which a terminal sends to all. Set
    once that has happened."""
    told = Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def pass_on(number: int, frame: FrameType | None) -> None:
        told.set()
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, END)
        handler = before[signal.Signals(number)]
        assert callable(handler)
        handler(number, frame)

    ours = current_thread() is main_thread()  # no other one can be told
    heeded = [number for number, handler in before.items() if ours and callable(handler)]
    try:
        for number in heeded:
            signal.signal(number, pass_on)
        yield told
    finally:
        for number in heeded:
            signal.signal(number, before[number])


@contextmanager
def _children(
    places: Sequence[ProcessAddress], rank_group: RankGroup
) -> Iterator[tuple[list[BaseProcess], Semaphore]]:
    """Fresh processes, each of which says once that it is ready; gone when the block ends."""
    context = get_context("spawn")
    ready = context.Semaphore(0)
    processes: list[BaseProcess] = [
        context.Process(target=_child, args=(place, rank_group, ready), daemon=True) for place in places
    ]
    for process in processes:
        process.start()
    try:
        yield processes, ready
    finally:
        _ended(processes)
        for process in processes:
            process.terminate()
        _ended(processes)
        for process in processes:
            process.kill()  # one that is stopped, or hangs in native code, is told nothing
            process.join()


def _ended(processes: Sequence[BaseProcess]) -> None:
    """Once they all have, or after the grace."""
    deadline = time.monotonic() + _GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _await(processes: Sequence[BaseProcess], ready: Semaphore) -> None:
    """Until all are ready to meet: while they do, torch.distributed answers to nobody. Raises LinkError."""
    deadline = time.monotonic() + PATIENCE
    for _ in processes:
        while not ready.acquire(timeout=_GLANCE):
            if not all(process.is_alive() for process in processes):
                raise LinkError("a process ended before all had started")
            if time.monotonic() > deadline:
                raise LinkError(f"processes did not start within {PATIENCE:g} s")


def _child(place: ProcessAddress, rank_group: RankGroup, ready: Semaphore) -> None:
    """Whatever ends it early, the first process tells of."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(END, _interrupt)
    try:
        ready.release()
        run_place(place, "tcp", rank_group)
    except (LinkError, KeyboardInterrupt):
        os._exit(_EARLY)  # at once: nothing is left to be told, and threads may listen to one that hangs


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise KeyboardInterrupt


def _fates(processes: Sequence[BaseProcess], names: Sequence[str]) -> str:
    """What became of the others, where they did not end as they should."""
    _ended(processes)
    told = [
        f"{names[rank]} ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"
        for rank, process in enumerate(processes, 1)
        if (code := process.exitcode) not in (None, 0, _EARLY)
    ]
    return "".join(f"; {line}" for line in told)
