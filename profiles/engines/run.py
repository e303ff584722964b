"""One run of an engine's scheduler, in the engine's process: what ``ranks.threads.run_alone`` is for our own."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from ...sched.observe import Clock, Observer, StepInfo, StepKind
from ..measure.steps import STEADY
from ..platform.capacity import link_profile
from ..platform.hardware import HardwareProfile, load
from ..platform.resolve import Resolved
from ..programs.cuda_program import CudaProgram
from ..programs.hollow import HollowKernelError, HollowPackages
from ..programs.torch_cuda import cuda_answered
from ..programs.triton_kernels import (
    KernelBoundsError,
    TritonKernelError,
    TritonPrograms,
    triton_interpreted,
)
from ..record.provenance import EdgePart
from ..record.result import Result
from ..record.timeline import Names, Window
from ..run.machines import Options, one_thread, open_machine
from ..run.rank_context import RankContext
from ..run.runner import ExtraSink, GatedSink
from ..run.system import System, SystemParts
from ..run.task import RankReport, RunTask
from ..vgpu.device import CURRENT
from ..vgpu.engine import QUEUES, Simulation
from ..vgpu.gpu import open_vgpu, patched
from .adapter import EngineAdapter
from .names import EngineError
from .turns import TurnLink

if TYPE_CHECKING:
    from ...sched.link import Link
    from .server import LoadedEngine

_IMPORTED_ON: Final = "h200"  # modules ask for a CUDA device, and for nothing that differs between profiles
_BEAT_EVERY_S: Final = 1.0


def load_engine(adapter: EngineAdapter) -> None:
    """Import the engine while ``torch.cuda`` is answered: what a device can do is asked as modules are imported. The
    virtual GPU of the imports is not that of a run."""
    hardware = load(_IMPORTED_ON)
    with one_thread(), open_vgpu(hardware), _answered(hardware):
        adapter.load()


@contextmanager
def _answered(hardware: HardwareProfile) -> Iterator[tuple[CudaProgram, TritonPrograms]]:
    """CUDA and Triton answered by the open virtual GPU."""
    gpu = CURRENT.get()
    with cuda_answered(gpu, hardware) as program, triton_interpreted(gpu) as kernels:
        yield program, kernels


class Heartbeat(Observer):
    """An observer that calls ``beat`` at a step's end, at most once per second, so that a run that does not advance can
    be ended."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        self._due = 0.0

    def settled(self, info: StepInfo) -> None:  # noqa: ARG002
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _BEAT_EVERY_S
            self._beat()


class StepKinds:
    """A sink that keeps the kinds of the measured steps, by number."""

    def __init__(self) -> None:
        self.kinds: dict[int, StepKind] = {}

    def begin(self) -> None:
        self.kinds.clear()

    def feed(self, window: Window) -> None:
        self.kinds.update((info.step, info.kind) for info in window.launched)

    def finish(self, names: Names) -> None:
        """Nothing is left to keep."""

    def uncounted(self, hollow: HollowPackages) -> Mapping[str, str]:
        """Kinds of steps that called functions of ``hollow`` packages, each with the reason not to count them."""
        called: defaultdict[str, set[str]] = defaultdict(set)
        for step, names in hollow.used_in.items():
            if step in self.kinds:
                called[self.kinds[step]] |= names
        return {
            kind: f"{', '.join(sorted(names))} was called, which is not installed: what it launches is unknown"
            for kind, names in sorted(called.items())
        }


def run_on_engine(
    engine: LoadedEngine,
    resolved: Resolved,
    options: Options,
    context: RankContext,
    link: TurnLink | None,
    extra_sinks: Sequence[ExtraSink],
    beat: Callable[[], None],
) -> RankReport:
    """Run the scenario by the engine, or the part of that rank, which has a ``link`` to other stages of a pipeline or
    to other workers. ``beat`` is called while the run advances. Raises EngineError, MachineError."""
    sink = GatedSink((steps := StepKinds(),))
    engine.hollow.used_in.clear()
    with ExitStack() as stack:
        simulation = None
        if link is not None:
            context = context._replace(link=cast("Link", link))  # a run sends and receives values alone
            gap = round(resolved.hardware.kernels.gap.value)
            # Streams are numbered apart from other stages', for the hazard checker.
            simulation = Simulation(gap=gap, first=context.rank * QUEUES)
            stack.enter_context(patched(hazards=options.hazards))
        counted = replace(options, counted=True)  # the kinds of steps are known from the timeline
        watch = [engine.source.watched]
        machine = open_machine("vgpu", resolved, sink, counted, watch=watch, simulation=simulation)
        opened = stack.enter_context(machine)
        program, kernels = stack.enter_context(_answered(resolved.hardware))
        if link is not None:
            stack.enter_context(link.opened(CURRENT.get(), link_profile(resolved)))
        system: list[System] = []

        def make_system(parts: SystemParts) -> System:
            system.append(engine.adapter.open(parts))
            return system[-1]

        def observe(clock: Clock, total: int) -> AbstractContextManager[Observer]:  # noqa: ARG001
            return nullcontext(Heartbeat(beat))

        task = RunTask(resolved, options, "vgpu", observe, extra_sinks, make_system=make_system)
        try:
            report = task.run(opened, sink, context)
        except KernelBoundsError:
            raise
        except (HollowKernelError, TritonKernelError) as error:
            raise EngineError(f"the engine cannot be run with this scenario: {error}") from error
    edge = _edge(engine.hollow, program, kernels, system[0], steps)
    part = engine.source.part.model_copy(update={"edge": edge})
    labels = report.result.labels.model_copy(update={"engine": part})
    leak = system[0].leak and f"{'' if link is None else f'{context.name}: '}{system[0].leak}"
    run = report.result.run.model_copy(update={"leak": leak or None})
    result = report.result.model_copy(update={"labels": labels, "run": run})
    return report._replace(result=_without(edge.uncounted, result))


def _edge(
    hollow: HollowPackages, program: CudaProgram, kernels: TritonPrograms, system: System, steps: StepKinds
) -> EdgePart:
    """What of the engine's surroundings was not there in the run."""
    return EdgePart(
        hollow=tuple(sorted(hollow.names & hollow.imported)),
        answered_by_default=tuple(sorted(program.defaults | set(system.defaults))),
        without_effect=tuple(sorted(set().union(*hollow.used_in.values()))),
        autotuned=tuple(sorted(kernels.autotuned)),
        uncounted=steps.uncounted(hollow),
    )


def _without(kinds: Mapping[str, str], result: Result) -> Result:
    """The result with nothing that is counted in steps of those kinds."""
    return result.model_copy(
        update={
            "per_step": {k: v for k, v in result.per_step.items() if k.removesuffix(STEADY) not in kinds},
            "copies": tuple(row for row in result.copies if row.kind not in kinds),
            "syncs": tuple(row for row in result.syncs if row.kind not in kinds),
        }
    )
