"""One run of an engine's scheduler, in the engine's process: what ``ranks.threads.run_alone`` is for our own."""

from __future__ import annotations

from pathlib import Path

from ...sched.relay.choice import RelayChoice
from ..platform.resolve import Resolved
from ..programs.torch_cuda import cuda_answered
from ..record.result import Result
from ..run.machines import open_machine
from ..run.rank_context import ALONE
from ..run.runner import GatedSink
from ..run.task import Options, RunTask
from ..vgpu.device import CURRENT
from .adapter import EngineAdapter


def run_on_engine(
    adapter: EngineAdapter, folder: Path, resolved: Resolved, relay: RelayChoice, options: Options
) -> Result:
    """Run the scenario by the engine whose package lies in ``folder``. Raises EngineError, MachineError."""
    sink = GatedSink()
    machine = open_machine(
        "vgpu",
        resolved,
        sink,
        hazards=options.hazards,
        adversary=options.adversary,
        watch=[folder / adapter.package],
    )
    with machine as opened, cuda_answered(CURRENT.get(), name=resolved.hardware.name):
        task = RunTask(resolved, relay, options, "vgpu", make_system=adapter.open)
        return task.run(opened, sink, ALONE).result
