"""Calibrates a machine: measures it, fits constants, and makes a hardware profile of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..cuda import machine as cuda_machine
from ..platform.hardware import HardwareProfile, load
from ..record.environment import environment
from ..record.files import write_whole
from ..run.gpu_stages import GpuStage, in_process
from .device import PROBES, DeviceConstants, device_constants
from .fit import FittedLine
from .host import CalibrationRun, HostTimes, calibration_runs, fit_kinds, fit_phases, measure
from .profile import FittedConstant, Provenance, calibrated, phase_constants, to_yaml

_DEADLINE = 60.0  # seconds for a probe
_NAMES = ("environment", *PROBES)

Notify = Callable[[str], object]


class Calibration(NamedTuple):
    """``missing`` names what could not be measured; ``profile`` has the base's values there."""

    base: HardwareProfile
    lines: dict[str, FittedLine]
    constants: list[FittedConstant]
    missing: list[str]
    times: HostTimes
    provenance: Provenance
    profile: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        old = {name: {"a": line.a.value, "b": line.b.value} for name, line in self.base.phases.items()}
        phases: dict[str, dict[str, Any]] = {
            name: {**line._asdict(), "old": old.get(name), "kinds": {}} for name, line in self.lines.items()
        }
        for (name, kind), line in fit_kinds(self.times).items():
            phases[name]["kinds"][kind] = line._asdict()
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


def conclusion(document: Mapping[str, Any]) -> str:
    """Return what was fitted with the worst line, and with ``judged`` how far declared host times are from measured
    ones."""
    phases, device = document["phases"], document["device"]
    worst = max(phases, key=lambda name: phases[name]["worst"])
    parts = [
        f"{len(phases)} host phases" + (f" and {len(device)} constants of the device" if device else ""),
        f"the worst line is {worst}'s, x {phases[worst]['worst']:.3g} at n = {phases[worst]['worst_n']:g}",
    ]
    if judged := document.get("judged"):
        signs, error = judged["signs"], judged["median_error"]
        near = "" if error is None else f"within {100 * error:.1f} % in the median, "
        agree = f"{signs['agree']} of {signs['agree'] + signs['differ']} changes have the same sign"
        parts.append(f"declared host times against measured: {near}{agree}")
    return f"{document['machine']}: {'; '.join(parts)}."


def require_cuda() -> None:
    """Raises MachineError."""
    cuda_machine.require_cuda(
        "its calls, copies and kernels cannot be measured; --host-only measures the scheduler's own phases alone"
    )


def calibrate(
    base: HardwareProfile,
    plan: Sequence[CalibrationRun],
    probes: Mapping[str, Any] | None,
    *,
    name: str,
    rounds: int,
    notify: Notify,
) -> Calibration:
    """``probes`` are the documents of a GPU's probes by name; None if only the host is measured."""
    device = DeviceConstants([], []) if probes is None else device_constants(base, probes)

    def describe(run: CalibrationRun) -> None:
        notify(" ".join((run.scenario, *(text for text in run.overrides if text.startswith("workload.")))))

    times = measure(base, plan, rounds=rounds, notify=describe)
    unmet = [f"phase {phase}: no run met it" for phase in base.phases if phase not in times.phases]
    constants = [*device.constants, *phase_constants(base, times)]
    by = Provenance(_machine(probes or {}), f"{datetime.now(UTC):%Y-%m-%d}")
    return Calibration(
        base,
        fit_phases(times),
        constants,
        [*device.missing, *unmet],
        times,
        by,
        calibrated(base, constants, by, name=name),
    )


def _machine(probes: Mapping[str, Any]) -> str:
    gpu = probes.get("environment", {}).get("gpu")
    cpu = str(environment()["cpu"])
    return cpu if gpu is None else f"{gpu}, {cpu}"


def probed(notify: Notify, python: str = sys.executable) -> dict[str, Any]:
    """The documents of the probes by name, without those that failed. Each runs in a process of its own, because CUDA
    cannot pin memory in a process with a virtual GPU."""
    with tempfile.TemporaryDirectory() as folder:
        run = in_process(python, Path(folder))
        for name in _NAMES:
            notify(f"probe {name}")
            output = os.path.join(folder, f"probe-{name}.json")
            stage = GpuStage(name, ("-m", "schedbench.profiles.lab.probes", name, output), _DEADLINE)
            outcome = run(stage, _DEADLINE)
            if outcome.status != "ok":
                notify(f"probe {name} failed: {outcome.error}")
        return gathered(Path(folder))


def gathered(folder: Path) -> dict[str, Any]:
    """The documents of probes in ``folder``, which are named ``probe-NAME.json``."""
    paths = {name: folder / f"probe-{name}.json" for name in _NAMES}
    return {
        name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()
    }


def main(arguments: Sequence[str]) -> int:
    """A stage of ``make gpu``: ``schedbench calibrate`` with probes that have run before."""
    parser = argparse.ArgumentParser(description="Fit a hardware profile to this machine.")
    parser.add_argument("--probes", type=Path, required=True, help="the folder that the probes wrote into")
    parser.add_argument("--base", default="h200")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    plan, probes = calibration_runs(given.batch_sizes, given.prompt_tokens), gathered(given.probes)
    found = calibrate(load(given.base), plan, probes, name=given.output.stem, rounds=1, notify=print)
    write_whole(given.output, to_yaml(found.profile))
    write_whole(given.output.with_suffix(".json"), json.dumps(found.document(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
