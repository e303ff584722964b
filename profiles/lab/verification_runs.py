"""The three runs of a verification, each in a process of its own: CUDA cannot pin memory beside the virtual GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from ..cuda import machine as cuda_machine
from ..platform.machine import MachineError
from ..platform.resolve import Resolved
from ..record.result import read
from ..run.gpu_stages import GpuStage, in_process
from ..run.machines import device_kind
from . import counted_run, single_run
from .verification import Verification, verify

# All requests arrive at once and no token ends one, so that the schedule depends neither on the machine's speed nor on
# its rounding.
PLAIN: Final = ("workload.arrival={process: burst}", "workload.sampling.ignore_eos=true")

_DEADLINE: Final = 600.0  # seconds for a run
_PREDICTED, _ANNOUNCED, _RECORDED = "predicted", "announced", "recorded"


class VerificationError(RuntimeError):
    """One of the runs failed."""


def require_cuda(resolved: Resolved) -> None:
    """Raises MachineError if there is no CUDA device, or if the scenario needs more than one."""
    cuda_machine.require_cuda(
        "the prediction has nothing to be compared with; run and check predict without one"
    )
    if resolved.scenario.engine.ranks > 1:
        raise MachineError("the scenario has several ranks: one device is verified")
    device_kind("cuda", resolved.scenario)


def stages(scenario: str, overrides: Sequence[str], folder: Path, *, device: str = "cuda") -> list[GpuStage]:
    """The prediction is first: a scenario that fails there fails everywhere."""
    words = [word for override in overrides for word in ("--set", override)]

    def stage(name: str, module: ModuleType, where: str) -> GpuStage:
        output = ("--output", str(folder / f"{name}.json"))
        arguments = ("-m", module.__name__, scenario, "--device", where, *words, *output)
        return GpuStage(name, arguments, _DEADLINE)

    return [
        stage(_PREDICTED, single_run, "vgpu"),
        stage(_ANNOUNCED, counted_run, device),
        stage(_RECORDED, single_run, device),
    ]


def conduct(plan: Sequence[GpuStage], folder: Path, notify: Callable[[str], object]) -> Verification:
    """Run the stages, which write into ``folder``. Raises VerificationError."""
    run = in_process(sys.executable, folder)
    for stage in plan:
        notify(f"{stage.name}: {' '.join(stage.arguments[1:])}")
        outcome = run(stage, stage.deadline)
        if outcome.status != "ok":
            raise VerificationError(f"the {stage.name} run failed: {outcome.error}")
    counts = json.loads((folder / f"{_ANNOUNCED}.json").read_text(encoding="utf-8"))
    return verify(read(folder / f"{_PREDICTED}.json"), counts, read(folder / f"{_RECORDED}.json"))
