"""One run of an engine's scheduler, in the engine's process: what ``ranks.threads.run_alone`` is for our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ...sched.relay.choice import RelayChoice
from ..platform.hardware import HardwareProfile, load
from ..platform.resolve import Resolved
from ..programs.cuda_program import CudaProgram
from ..programs.hollow import HollowPackages
from ..programs.torch_cuda import cuda_answered
from ..programs.triton_kernels import triton_interpreted
from ..record.provenance import EdgePart
from ..record.result import Result
from ..run.machines import one_thread, open_machine
from ..run.rank_context import ALONE
from ..run.runner import GatedSink
from ..run.system import System, SystemParts
from ..run.task import Options, RunTask
from ..vgpu import open_vgpu
from ..vgpu.device import CURRENT
from .adapter import EngineAdapter
from .heartbeat import heartbeat
from .source import EngineSource

_IMPORTED_ON: Final = "h200"  # modules ask for a CUDA device, and for nothing that differs between profiles


def load_engine(adapter: EngineAdapter) -> None:
    """Import the engine while ``torch.cuda`` is answered: what a device can do is asked as modules are imported. The
    virtual GPU of the imports is not that of a run."""
    hardware = load(_IMPORTED_ON)
    with one_thread(), open_vgpu(hardware), _answered(hardware):
        adapter.load()


@contextmanager
def _answered(hardware: HardwareProfile) -> Iterator[CudaProgram]:
    """CUDA and Triton answered by the open virtual GPU."""
    gpu = CURRENT.get()
    with cuda_answered(gpu, hardware) as program, triton_interpreted(gpu):
        yield program


def run_on_engine(
    adapter: EngineAdapter,
    source: EngineSource,
    hollow: HollowPackages,
    resolved: Resolved,
    relay: RelayChoice,
    options: Options,
) -> Result:
    """Run the scenario by the engine that ``source`` has and that was imported beside the ``hollow`` packages. Raises
    EngineError, MachineError, HollowKernelError."""
    sink = GatedSink()
    machine = open_machine(
        "vgpu",
        resolved,
        sink,
        hazards=options.hazards,
        adversary=options.adversary,
        watch=[source.watched],
    )
    with machine as opened, _answered(resolved.hardware) as program:
        system: list[System] = []

        def make_system(parts: SystemParts) -> System:
            system.append(adapter.open(parts))
            return system[-1]

        task = RunTask(resolved, relay, options, "vgpu", observe=heartbeat, make_system=make_system)
        result = task.run(opened, sink, ALONE).result
    edge = EdgePart(
        hollow=tuple(sorted(hollow.names & hollow.imported)),
        answered_by_default=tuple(sorted(program.defaults | set(system[0].defaults))),
    )
    return result.model_copy(
        update={"labels": result.labels.model_copy(update={"engine": source.part(edge)})}
    )
