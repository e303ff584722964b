"""The three runs of a verification, each a process of its own: beside the virtual GPU CUDA cannot pin memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from ..platform.machine import MachineError
from ..platform.resolve import Resolved
from ..record.result import read
from ..run.machines import chosen
from ..run.stages import GpuStage, in_process
from .verification import Verification, verify

# Nothing of what is scheduled may depend on the machine's speed or on its rounding: all requests at once, and no
# token ends one.
PLAIN: Final = ("workload.arrival={process: burst}", "workload.sampling.ignore_eos=true")

_PACKAGE: Final = "schedbench.profiles.lab"
_DEADLINE: Final = 600.0  # seconds for a run
_PREDICTED, _ANNOUNCED, _RECORDED = "predicted", "announced", "recorded"


class VerificationError(RuntimeError):
    """One of the runs failed."""


def require_cuda(resolved: Resolved) -> None:
    """Raises MachineError where there is no CUDA, or the scenario is none for one real device."""
    if not torch.cuda.is_available():
        raise MachineError(
            "no CUDA device here (torch.cuda.is_available() is False): there is nothing to hold the prediction "
            "against; run and check predict without one"
        )
    if resolved.scenario.engine.ranks > 1:
        raise MachineError("the scenario has several ranks: what is verified is one device")
    chosen("cuda", resolved.scenario)


def stages(scenario: str, overrides: Sequence[str], folder: Path, *, device: str = "cuda") -> list[GpuStage]:
    """Prediction first: what fails there fails everywhere, and soonest."""
    words = [word for override in overrides for word in ("--set", override)]

    def stage(name: str, module: str, where: str) -> GpuStage:
        output = ("--output", str(folder / f"{name}.json"))
        return GpuStage(
            name, ("-m", f"{_PACKAGE}.{module}", scenario, "--device", where, *words, *output), _DEADLINE
        )

    return [
        stage(_PREDICTED, "single_run", "vgpu"),
        stage(_ANNOUNCED, "counted_run", device),
        stage(_RECORDED, "single_run", device),
    ]


def conduct(plan: Sequence[GpuStage], folder: Path, tell: Callable[[str], object]) -> Verification:
    """Run the stages, which write into ``folder``. Raises VerificationError."""
    run = in_process(sys.executable, folder)
    for stage in plan:
        tell(f"{stage.name}: {' '.join(stage.arguments[1:])}")
        outcome = run(stage, stage.deadline)
        if outcome.status != "ok":
            raise VerificationError(f"the {stage.name} run failed: {outcome.error}")
    counts = json.loads((folder / f"{_ANNOUNCED}.json").read_text(encoding="utf-8"))
    return verify(read(folder / f"{_PREDICTED}.json"), counts, read(folder / f"{_RECORDED}.json"))
