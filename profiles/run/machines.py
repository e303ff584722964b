"""Opens the machine that a run asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ...scenarios.schema import Scenario
from ...sched.observe import Clock
from ..cuda.clock import WallClock
from ..cuda.hazards.machine import open_cuda_with_hazards
from ..cuda.machine import open_cuda
from ..platform import capacity
from ..platform.machine import ByItself, HostTime, Machine, MachineError
from ..platform.resolve import Resolved
from ..ranks.device import QUEUES, SharedSimulation
from ..ranks.direct import take_a_gpu
from ..ranks.ports import DevicePorts, Ports, VirtualPorts
from ..ranks.rank_threads import Member
from ..ranks.virtual import WorldClock
from ..record.result import HardwarePart, Labels
from ..record.timeline import Sink
from ..vgpu import VirtualGpu, open_vgpu
from ..vgpu.engine import Simulation
from ..vgpu.gpu import patched
from ..vgpu.host_time import measured, without_own_time
from ..vgpu.tensor import CURRENT, DeviceTensor

Chosen = Literal["cuda", "vgpu"]
Kind = Literal["auto"] | Chosen


def chosen(kind: Kind, scenario: Scenario) -> Chosen:
    """``auto`` takes CUDA where there is one and it can do what the scenario asks. Raises MachineError."""
    emulated_only, available = _emulated_only(scenario), torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise MachineError(
            "no CUDA device here (torch.cuda.is_available() is False); --device vgpu emulates one"
        )
    if kind == "auto":
        return "cuda" if available and not emulated_only else "vgpu"
    if kind == "cuda" and emulated_only:
        raise MachineError(emulated_only)
    return kind


def _emulated_only(scenario: Scenario) -> str:
    """Why the scenario's device can only be a virtual one; empty if CUDA will do."""
    if scenario.device.values == "none":
        return "device.values: none skips the arithmetic and exists only on the virtual GPU"
    if not scenario.engine.hisparse.enabled:
        return ""
    if find_spec("triton") is None:
        return (
            "engine.hisparse: on CUDA its kernels read pinned host memory, for which Triton is not installed"
        )
    if scenario.model.dtype == "float64":
        return "engine.hisparse: on CUDA its kernels read pinned host memory, which those for float64 do not"
    return ""


def open_machine(
    kind: Chosen,
    resolved: Resolved,
    sink: Sink,
    *,
    hazards: bool = False,
    adversary: int | None = None,
    keep_trace: Path | None = None,
) -> AbstractContextManager[Machine]:
    """``hazards`` are watched for, or on the virtual GPU the ``adversary`` of that number is at work; of CUDA the trace
    of the counting pass may be kept. Raises MachineError."""
    if kind == "vgpu":
        return _virtual(resolved, sink, hazards=hazards, adversary=adversary)
    if adversary is not None:
        raise MachineError("an adversary decides when work is done; a real device does so itself")
    return open_cuda_with_hazards(resolved, sink) if hazards else open_cuda(resolved, sink, keep_trace)


@contextmanager
def open_rank(
    resolved: Resolved, sink: Sink, member: Member, *, hazards: bool, adversary: int | None
) -> Iterator[tuple[Machine, VirtualGpu]]:
    """One of several virtual GPUs, whose ranks take turns."""
    gap = round(resolved.hardware.kernels.gap.value)
    with (
        one_thread(),
        open_vgpu(
            resolved.hardware,
            values=resolved.scenario.device.values,
            sink=sink,
            hazards=hazards,
            adversary=adversary,
            simulation=SharedSimulation(gap=gap, member=member),
        ) as gpu,
    ):
        member.attach(gpu.runtime.simulation, lambda: gpu.runtime.now)
        machine = _machine(gpu, resolved, ByItself(), hazards=hazards)
        yield replace(machine, clock=WorldClock(gpu, member)), gpu


class OpenedRank(NamedTuple):
    """One process's among several. Who has no work for a device has a clock all the same."""

    machine: Machine | None
    clock: Clock
    ports: Ports


@contextmanager
def open_port(
    kind: Chosen, resolved: Resolved, sink: Sink, rank: int, *, hazards: bool, adversary: int | None
) -> Iterator[OpenedRank]:
    """A machine of one process among several, and how its tensors get on and off the device. What one device's checker
    hears of another's streams has numbers of its own."""
    if kind == "cuda":
        take_a_gpu()
        with open_cuda(resolved, sink, None) as machine:
            yield OpenedRank(machine, machine.clock, DevicePorts(machine.device))
        return
    device = Simulation(gap=round(resolved.hardware.kernels.gap.value), first=rank * QUEUES)
    opened = _virtual(resolved, sink, hazards=hazards, adversary=adversary, simulation=device)
    with patched(hazards=hazards), opened as machine:
        yield OpenedRank(machine, machine.clock, VirtualPorts(CURRENT.get()))


@contextmanager
def open_context(kind: Chosen, resolved: Resolved, sink: Sink) -> Iterator[OpenedRank]:
    """Of the same process without a device: its time is real where the others' devices are."""
    if kind == "cuda":
        yield OpenedRank(None, WallClock(), DevicePorts(torch.device("cpu")))
        return
    with _virtual(resolved, sink, hazards=False, adversary=None) as machine:
        yield OpenedRank(None, machine.clock, VirtualPorts(CURRENT.get()))


@contextmanager
def _virtual(
    resolved: Resolved,
    sink: Sink,
    *,
    hazards: bool,
    adversary: int | None,
    simulation: Simulation | None = None,
) -> Iterator[Machine]:
    capacity.check(resolved)
    scenario, hardware = resolved.scenario, resolved.hardware
    modelled = scenario.device.host == "modelled"
    charged = hardware if modelled else without_own_time(hardware)
    with (
        one_thread(),
        open_vgpu(
            charged,
            values=scenario.device.values,
            sink=sink,
            hazards=hazards,
            adversary=adversary,
            simulation=simulation,
        ) as gpu,
        _host_time(gpu, modelled=modelled) as host,
    ):
        yield _machine(gpu, resolved, host, hazards=hazards)


def _machine(gpu: VirtualGpu, resolved: Resolved, host: HostTime, *, hazards: bool) -> Machine:
    scenario, hardware = resolved.scenario, resolved.hardware
    return Machine(
        device=gpu.device,
        capabilities=gpu.capabilities,
        clock=gpu.clock,
        observer=gpu.observer,
        names=gpu,
        labels=Labels(emulated=True, host=scenario.device.host),
        hardware=HardwarePart(name=hardware.name, sha256=hardware.sha256),
        exact=scenario.device.host == "modelled",
        flush=gpu.flush,
        peek=_held,
        environment={},
        host=host,
        hazards=gpu.watcher if hazards else None,
    )


def _host_time(gpu: VirtualGpu, *, modelled: bool) -> AbstractContextManager[HostTime]:
    return nullcontext(ByItself()) if modelled else measured(gpu)


@contextmanager
def one_thread() -> Iterator[None]:
    """The emulator's tensors are small: more threads cost more in waking up than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _held(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DeviceTensor)
    return tensor.held
