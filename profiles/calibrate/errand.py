"""A machine's calibration from beginning to end: what is measured, what it gives, and the profile made of it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..cuda.stages import Stage, in_process
from ..environment import environment
from ..hardware import HardwareProfile
from ..machine import MachineError
from .device import PROBES, DeviceConstants, device_constants
from .fit import Line
from .host import Errand, HostTimes, fit_phases, measure
from .profile import Constant, Provenance, calibrated, phase_constants

_DEADLINE = 60.0  # seconds for a probe

Tell = Callable[[str], object]


class Calibration(NamedTuple):
    """``missing``: what was asked for and could not be told; ``profile`` has the base's values there."""

    base: HardwareProfile
    lines: dict[str, Line]
    constants: list[Constant]
    missing: list[str]
    times: HostTimes
    provenance: Provenance
    profile: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        phases = {name: {**line._asdict(), "old": _old(self.base, name)} for name, line in self.lines.items()}
        device = [
            {"key": ".".join(c.key), "value": c.value, "old": c.old, "basis": c.basis}
            for c in self.constants
            if c.key[0] != "phases"
        ]
        return {
            "base": self.base.name,
            **self.provenance._asdict(),
            "phases": phases,
            "device": device,
            "missing": self.missing,
            "through_torch_ns": self.times.through_torch,
            "outside_us_per_step": self.times.outside_us,
            "profile": self.profile,
        }


def _old(base: HardwareProfile, name: str) -> dict[str, float] | None:
    phase = base.phases.get(name)
    return None if phase is None else {"a": phase.a.value, "b": phase.b.value}


def require_cuda() -> None:
    """Raises MachineError."""
    if not torch.cuda.is_available():
        raise MachineError(
            "no CUDA device here (torch.cuda.is_available() is False): its calls, copies and kernels cannot be "
            "measured; --host-only measures the scheduler's own phases alone"
        )


def calibrate(
    base: HardwareProfile, plan: Sequence[Errand], *, name: str, rounds: int, host_only: bool, tell: Tell
) -> Calibration:
    """Raises MachineError where there is no CUDA, unless ``host_only``."""
    told = DeviceConstants([], []) if host_only else _device(base, tell)
    times = measure(base, plan, rounds=rounds, tell=lambda errand: tell(_in_words(errand)))
    unmet = [f"phase {phase}: no run met it" for phase in base.phases if phase not in times.phases]
    constants = [*told.constants, *phase_constants(base, times)]
    by = Provenance(_machine(host_only=host_only), f"{datetime.now(UTC):%Y-%m-%d}")
    return Calibration(
        base,
        fit_phases(times),
        constants,
        [*told.missing, *unmet],
        times,
        by,
        calibrated(base, constants, by, name=name),
    )


def _in_words(errand: Errand) -> str:
    return " ".join((errand.scenario, *(text for text in errand.overrides if text.startswith("workload."))))


def _machine(*, host_only: bool) -> str:
    cpu = str(environment()["cpu"])
    return cpu if host_only else f"{torch.cuda.get_device_name()}, {cpu}"


def _device(base: HardwareProfile, tell: Tell) -> DeviceConstants:
    """The probes run in processes of their own: where the virtual GPU is open, CUDA cannot pin memory."""
    require_cuda()
    with tempfile.TemporaryDirectory() as folder:
        return device_constants(base, probed(Path(folder), tell))


def probed(folder: Path, tell: Tell, python: str = sys.executable) -> dict[str, Any]:
    """Each probe's document; nothing for one that failed, which is told."""
    run, found = in_process(python, folder), {}
    for name in PROBES:
        tell(f"probe {name}")
        output = folder / f"{name}.json"
        stage = Stage(name, ("-m", "schedbench.profiles.cuda.probes", name, os.fspath(output)), _DEADLINE)
        outcome = run(stage, _DEADLINE)
        if outcome.status == "ok":
            found[name] = json.loads(output.read_text(encoding="utf-8"))
        else:
            tell(f"probe {name} failed: {outcome.error}")
    return found
