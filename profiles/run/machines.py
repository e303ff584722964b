"""Opens the machine that a rank runs on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Final, Literal

import torch

from ... import sched
from ...scenarios.schema import Scenario
from ..platform import capacity
from ..platform.machine import HostTime, Machine, MachineError
from ..platform.resolve import Resolved
from ..platform.user_files import UserState
from ..record.provenance import HardwarePart, Labels
from ..record.timeline import Sink
from ..vgpu.counterfactual import Counterfactual
from ..vgpu.engine import Simulation
from ..vgpu.gpu import open_vgpu
from ..vgpu.host_time import measured, without_own_time

DeviceKind = Literal["cuda", "vgpu"]
DeviceChoice = Literal["auto"] | DeviceKind
NO_ADVERSARY: Final = "an adversary decides when work is done; a real device does so itself"


@dataclass(frozen=True, slots=True)
class Options:
    """``hazards``: whether accesses that nothing orders are recorded; it costs time. ``adversary``: number of one that
    does all work of the virtual GPU late. ``traced``: whether a real device's second, counting pass is run;
    ``keep_trace``: where its trace is kept. ``counterfactual``: a change of the virtual GPU's times; the result's
    counts are of that run. ``counted``: whether the virtual GPU's timeline is kept; without it, a result has requests,
    tokens and hazards alone. ``repeated``: whether measured times are measured ``measure.repeat`` times."""

    device: DeviceChoice = "auto"
    save_tokens: bool = False
    command: str = ""
    hazards: bool = False
    adversary: int | None = None
    world: Literal["virtual", "distributed"] = "virtual"  # of a scenario with several ranks
    traced: bool = True
    keep_trace: Path | None = None
    record: Path | None = None  # folder that gets every rank's timeline
    counterfactual: Counterfactual | None = None
    counted: bool = True
    repeated: bool = False


_DEFAULTS: Final = Options()


def device_kind(kind: DeviceChoice, scenario: Scenario) -> DeviceKind:
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


@contextmanager
def open_machine(
    kind: DeviceKind,
    resolved: Resolved,
    sink: Sink,
    options: Options = _DEFAULTS,
    *,
    simulation: Simulation | None = None,
    watch: Sequence[Path] | None = None,
) -> Iterator[Machine]:
    """The machine until the block ends. ``simulation``: of one virtual GPU among several, around all of which the
    caller has ``patched`` torch. ``watch``: the folders and files whose source lines are recorded, by default the
    scheduler's and those of its relays. Raises MachineError."""
    if kind == "cuda":
        if options.adversary is not None:
            raise MachineError(NO_ADVERSARY)
        from ..cuda.machine import open_cuda, open_cuda_with_hazards  # which a virtual GPU does not need

        with (
            open_cuda_with_hazards(resolved, sink)
            if options.hazards
            else open_cuda(resolved, sink, options.keep_trace)
        ) as machine:
            yield machine
        return
    capacity.check(resolved)
    scenario, hardware = resolved.scenario, resolved.hardware
    modelled = scenario.device.host == "modelled"
    with (
        one_thread(),
        open_vgpu(
            hardware if modelled else without_own_time(hardware),
            values=scenario.device.values,
            sink=sink if options.counted else None,
            hazards=options.hazards,
            adversary=options.adversary,
            simulation=simulation,
            watch=_scheduler_sources(resolved) if watch is None else watch,
            counterfactual=options.counterfactual,
        ) as gpu,
        nullcontext(HostTime()) if modelled else measured(gpu) as host,
    ):
        yield Machine(
            device=gpu.device,
            capabilities=gpu.capabilities,
            clock=gpu.clock,
            observer=gpu.observer,
            names=gpu,
            labels=Labels(emulated=True, host=scenario.device.host),
            hardware=HardwarePart(name=hardware.name, sha256=hardware.sha256),
            flush=gpu.flush,
            peek=attrgetter("held"),
            environment={},
            host=host,
            hazards=gpu.watcher if options.hazards else None,
        )


def _scheduler_sources(resolved: Resolved) -> Sequence[Path]:
    states = [relay.state for relay in resolved.relays]
    return [*map(Path, sched.__path__), *(state.file for state in states if isinstance(state, UserState))]


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread. The emulator's tensors are small: waking up more threads costs more than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
