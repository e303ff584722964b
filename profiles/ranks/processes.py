"""Runs ranks as processes of torch.distributed: started here on one machine, or by torchrun on several."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist

from ...scenarios.combinations import routed
from ...scenarios.failures import rank_names
from ...scenarios.problems import ScenarioError
from ...scenarios.schema import Scenario
from ...sched.data_parallel.mlp import COLUMNS, OWN, ROWS
from ...sched.data_parallel.sync import ROUND, RankStatus
from ...sched.disagg.layout import ENDED, HANDSHAKE, KV, REQUEST, Chunk, Dropped, Failed, Preallocated
from ...sched.link import Link, LinkError
from ...sched.loop.chunk_sizes import CHUNKS
from ...sched.loop.pipelined import OUTPUT, PROXY
from ...sched.observe import Clock
from ...sched.pipeline import REQUESTS, Curve
from ...sched.request import Request
from ..cuda.log import WallClock
from ..cuda.machine import open_cuda, require_one_device
from ..platform import capacity
from ..platform.interruption import sending_lost
from ..platform.machine import Machine, MachineError
from ..platform.own_process import claim_process, freeze_heap
from ..platform.pool import end_with_parent
from ..run.crash import exits_are_crashes
from ..run.machines import NO_ADVERSARY, open_machine
from ..run.rank_context import ALIGN, RankContext
from ..run.runner import GatedSink
from ..run.task import RunTask
from ..vgpu.device import CURRENT
from ..vgpu.engine import QUEUES, Simulation
from ..vgpu.gpu import patched
from .contexts import rank_contexts
from .join import Report
from .nixl import NixlTransport, require_nixl
from .process_link import ProcessLink
from .staging import TensorStaging, VirtualStaging
from .torchrun import ProcessAddress, launched
from .transports import TensorTransport, nccl_transport, take_gpu

PATIENCE: Final = 120.0  # seconds that a rank waits for another
_LOCAL: Final = "127.0.0.1"
_GRACE: Final = 5.0  # seconds in which a process ends by itself
_POLL_S: Final = 0.2  # seconds between two looks at processes that are starting
_EARLY: Final = 1  # exit code of a process that ended before its work was done
_END: Final = getattr(signal, "SIGUSR1", signal.SIGTERM)  # by which the first process ends the others
RESULT: Final = "result"
_SIZES: Final = tuple[int, ...]
# The type of the value that each tag of a message has. A link between processes refuses all others.
MESSAGE_TYPES: Final[Mapping[str, Any]] = {
    ALIGN: int,
    REQUEST: Request | None,
    ENDED: str,
    HANDSHAKE: Preallocated | Dropped,
    KV: Chunk | Failed,
    REQUESTS: tuple[int, list[Request] | None],
    PROXY: int,
    OUTPUT: int,
    CHUNKS: Curve,
    ROUND: RankStatus,
    ROWS: _SIZES,
    COLUMNS: _SIZES,
    OWN: _SIZES,
    RESULT: Report,
}


class WorldSizeError(ValueError):
    """More processes than ranks, or fewer."""


def local_addresses(ranks: int) -> list[ProcessAddress]:
    """Addresses for that many processes of this machine."""
    with socket.socket() as free:
        free.bind((_LOCAL, 0))
        port = free.getsockname()[1]
    return [ProcessAddress(rank, ranks, _LOCAL, port) for rank in range(ranks)]


def run_processes(task: RunTask, contexts: Sequence[RankContext]) -> list[Report]:
    """Run one process per rank: this one is the first, or the one that torchrun made it. Only this one has the caller's
    observer, sink and guard.

    Raises WorldSizeError, TorchrunError, MachineError, LinkError, ScenarioError; SystemExit in a process whose report
    another one has.
    """
    address, names = launched(), [context.name for context in contexts]
    _check(task, started_here=address is None)
    if address is not None:
        return _run_launched(address, task, names)
    addresses = local_addresses(len(contexts))
    with (
        _children(addresses[1:], task.without_caller()) as (processes, ready),
        _forwarding(processes) as ended,
    ):
        try:
            _await_start(processes, ready)
            reports = _run_rank(addresses[0], "tcp", task)
        except LinkError as error:
            if ended.is_set():  # the others had nothing yet to report
                raise KeyboardInterrupt from None
            raise LinkError(f"{error}{_crashes(processes, names)}") from None
    assert reports is not None
    return reports


def _run_launched(address: ProcessAddress, task: RunTask, names: Sequence[str]) -> list[Report]:
    if address.size != len(names):
        raise WorldSizeError(
            f"{address.size} processes were started, and the scenario has {len(names)} ranks"
            f" ({', '.join(names)}): torchrun --nproc-per-node {len(names)} on one machine"
        )
    reports = _run_rank(address, "env", task)
    if reports is None:
        raise SystemExit(0)
    return reports


def _check(task: RunTask, *, started_here: bool) -> None:
    """Raises ScenarioError or MachineError for what processes cannot do."""
    scenario, pair = task.resolved.scenario, task.resolved.scenario.engine.disaggregation
    _check_faults(scenario)
    if started_here and task.kind == "vgpu":
        capacity.check_world(task.resolved)
    if task.kind == "cuda" and task.options.adversary is not None:
        raise MachineError(NO_ADVERSARY)
    if task.kind == "cuda" and task.options.hazards:
        require_one_device(task.resolved)
    if _uses_nixl(scenario):
        require_nixl()
    if pair.mode != "none" and pair.transfer == "local":
        raise MachineError(
            "engine.disaggregation.transfer: local stays within one process, and --world distributed has several"
        )


def _uses_nixl(scenario: Scenario) -> bool:
    return routed(scenario) and scenario.engine.disaggregation.transfer == "nixl"


def _check_faults(scenario: Scenario) -> None:
    """A process can kill itself by script, except the first one, which reports how the run ended."""
    first = rank_names(scenario)[0]
    itself = f"{first} is the command itself: let another rank die, or use --world virtual"
    problems = [
        scenario.source.problem(
            ("faults", index),
            f"with --world distributed {'ranks die; their links are real' if failure.link else itself}",
        )
        for index, failure in enumerate(scenario.faults)
        if failure.link or failure.rank == first
    ]
    if problems:
        raise ScenarioError(problems)


@exits_are_crashes()
def _run_rank(address: ProcessAddress, meeting: str, task: RunTask) -> list[Report] | None:
    """Run this process's rank; the reports of all ranks in the first process, None in the others.

    Raises LinkError when the run broke off: what there is of it is not reported."""
    dist.init_process_group(
        "gloo",
        init_method="env://" if meeting == "env" else f"tcp://{address.host}:{address.port}",
        rank=address.rank,
        world_size=address.size,
        timeout=timedelta(seconds=PATIENCE),
    )
    try:
        contexts, sink = rank_contexts(task.resolved), GatedSink()
        context, names = contexts[address.rank], [one.name for one in contexts]
        with _open_rank(task, context, address.rank, sink) as (machine, clock, staging):
            transport = _transport(task, names, address.rank, machine)
            with ProcessLink(
                names, staging, clock, patience=PATIENCE, transport=transport, types=MESSAGE_TYPES
            ) as link:
                context = context.linked(
                    link, task.resolved.scenario, lambda _: os.kill(os.getpid(), signal.SIGKILL)
                )
                report = task.route(clock, context) if machine is None else task.run(machine, sink, context)
                if report.failure:
                    raise LinkError(report.failure)
                return _gathered(link, report)
    finally:
        dist.destroy_process_group()


@contextmanager
def _open_rank(
    task: RunTask, context: RankContext, rank: int, sink: GatedSink
) -> Iterator[tuple[Machine | None, Clock, TensorStaging]]:
    """The machine of a process's rank, its clock, and how tensors get on and off its device. A router has no machine;
    its clock is real where the others' devices are."""
    resolved, options = task.resolved, task.options
    if task.kind == "cuda" and context.is_router:
        yield None, WallClock(), TensorStaging(torch.device("cpu"))
    elif task.kind == "cuda":
        take_gpu()
        with open_cuda(resolved, sink, None) as machine:
            yield machine, machine.clock, TensorStaging(machine.device)
    else:
        options = replace(options, hazards=options.hazards and not context.is_router)
        # Streams are numbered apart from other ranks', for the hazard checker.
        simulation = Simulation(gap=round(resolved.hardware.kernels.gap.value), first=rank * QUEUES)
        with (
            patched(hazards=options.hazards),
            open_machine("vgpu", resolved, sink, options, simulation=simulation) as machine,
        ):
            yield None if context.is_router else machine, machine.clock, VirtualStaging(CURRENT.get())


def _transport(task: RunTask, names: Sequence[str], rank: int, machine: Machine | None) -> TensorTransport:
    """How tensors travel; all ranks call it together. Raises MachineError."""
    if _uses_nixl(task.resolved.scenario):
        return NixlTransport.start(names[rank], patience=PATIENCE)
    if task.kind == "vgpu":
        return TensorTransport()
    return nccl_transport(None if machine is None else machine.device)


def _gathered(link: Link, own: Report) -> list[Report] | None:
    if link.rank:
        link.send(0, RESULT, own)
        return None
    return [own, *(link.receive(rank, RESULT).value for rank in range(1, link.size))]


@contextmanager
def _forwarding(processes: Sequence[BaseProcess]) -> Iterator[Event]:
    """Forward this process's SIGINT and SIGTERM to the others, which ignore the Ctrl-C that a terminal sends to all of
    them. The event is set once that has happened."""
    ended = Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def forward(number: int, frame: FrameType | None) -> None:
        ended.set()
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, _END)
        handler = before[signal.Signals(number)]
        assert callable(handler)
        handler(number, frame)

    is_main = current_thread() is main_thread()  # only there can handlers be set
    handled = [number for number, handler in before.items() if is_main and callable(handler)]
    try:
        for number in handled:
            signal.signal(number, forward)
        yield ended
    finally:
        for number in handled:
            signal.signal(number, before[number])


@contextmanager
def _children(
    addresses: Sequence[ProcessAddress], task: RunTask
) -> Iterator[tuple[list[BaseProcess], Semaphore]]:
    """Fresh processes, each of which releases the semaphore when it is ready; they are gone when the block ends."""
    context = get_context("spawn")
    ready = context.Semaphore(0)
    processes: list[BaseProcess] = [
        context.Process(target=_run_child, args=(address, task, ready), daemon=True) for address in addresses
    ]
    for process in processes:
        process.start()
    try:
        yield processes, ready
    finally:
        # A process that is stopped, or hangs in native code, handles no signal but that of kill.
        for end in (BaseProcess.terminate, BaseProcess.kill):
            _join(processes)
            for process in processes:
                end(process)
        for process in processes:
            process.join()


def _join(processes: Sequence[BaseProcess]) -> None:
    """Wait until all have ended, or for the grace period."""
    deadline = time.monotonic() + _GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _await_start(processes: Sequence[BaseProcess], ready: Semaphore) -> None:
    """Wait until all are ready to meet: while they meet, torch.distributed handles no signal. Raises LinkError."""
    deadline = time.monotonic() + PATIENCE
    for _ in processes:
        while not ready.acquire(timeout=_POLL_S):
            if not all(process.is_alive() for process in processes):
                raise LinkError("a process ended before all had started")
            if time.monotonic() > deadline:
                raise LinkError(f"processes did not start within {PATIENCE:g} s")


def _run_child(address: ProcessAddress, task: RunTask, ready: Semaphore) -> None:
    """Run the rank of a started process, which ends with the first process. The first process reports what ends it
    early."""
    end_with_parent()
    claim_process()
    freeze_heap()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(_END, signal.default_int_handler)
    sys.unraisablehook = sending_lost(lambda: _END)
    try:
        ready.release()
        _run_rank(address, "tcp", task)
    except (LinkError, KeyboardInterrupt):
        os._exit(_EARLY)  # at once: there is nothing to report, and threads may wait for a process that hangs


def _crashes(processes: Sequence[BaseProcess], names: Sequence[str]) -> str:
    """How the other processes ended, where it was not as they should."""
    _join(processes)
    return "".join(
        f"; {names[rank]} ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"
        for rank, process in enumerate(processes, 1)
        if (code := process.exitcode) not in (None, 0, _EARLY)
    )
