"""Calibrates a machine: measures it, fits constants, and makes a hardware profile of them, as YAML for
``device.hardware``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from ..platform.hardware import HardwareProfile, load
from ..record.environment import environment
from ..record.files import write_whole
from ..run.gpu_stages import GpuStage, in_process
from .device import PROBES, calibrated, device_constants
from .fit import FittedConstant
from .host import CalibrationRun, FittedLines, calibration_runs, fit_lines, measure

Notify = Callable[[str], object]

_DEADLINE = 60.0  # seconds for a probe
_NAMES = ("environment", *PROBES)


def phase_constants(lines: FittedLines) -> Iterator[FittedConstant]:
    """a and b of every line; a sample's usual distance from the line is the spread of either part."""
    for (name, kind), line in lines.items():
        key = f"phases.{name}" if kind is None else f"phases.{name}.kinds.{kind}"
        sizes = "one size only" if line.sizes == 1 else f"{line.sizes} sizes"
        r2 = "" if line.r2 is None else f", R2 {line.r2:.2f}"
        basis = f"{line.samples} samples, {sizes}, residual {line.residual:.0f} ns{r2}"
        share = line.residual / max(line.at(line.worst_n), line.residual, 1.0)
        yield FittedConstant(f"{key}.a", line.a, line.residual, basis)
        yield FittedConstant(f"{key}.b", line.b, share * line.b, basis)


def to_yaml(document: Mapping[str, Any]) -> str:
    """One line per constant."""
    text: str = yaml.safe_dump(
        dict(document), sort_keys=False, default_flow_style=None, width=10_000, allow_unicode=True
    )
    return text


def conclusion(document: Mapping[str, Any]) -> str:
    """Return what was fitted, with the worst line."""
    phases, device = document["phases"], document["device"]
    worst = max(phases, key=lambda name: abs(math.log(phases[name]["worst"])))
    found = f"{len(phases)} host phases" + (f" and {len(device)} constants of the device" if device else "")
    line = f"{worst}'s, x {phases[worst]['worst']:.3g} at n = {phases[worst]['worst_n']:g}"
    return f"{document['machine']}: {found}; the worst line is {line}."


def calibrate(
    base: HardwareProfile,
    plan: Sequence[CalibrationRun],
    probes: Mapping[str, Any] | None,
    *,
    name: str,
    rounds: int,
    notify: Notify,
) -> dict[str, Any]:
    """The document of a calibration. ``missing`` names what could not be measured; ``profile`` has the base's values
    there. ``probes`` are the documents of a GPU's probes by name; None if only the host is measured."""
    device, missing = ([], []) if probes is None else device_constants(base, probes)
    samples, beside = measure(base, plan, rounds=rounds, notify=notify)
    lines = fit_lines(samples)
    constants = [*device, *phase_constants(lines)]
    gpu, cpu = (probes or {}).get("environment", {}).get("gpu"), str(environment()["cpu"])
    measured = {"machine": cpu if gpu is None else f"{gpu}, {cpu}", "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    return {
        "base": base.name,
        **measured,
        "phases": _phases(base, lines),
        "device": [{"key": c.key, "value": c.value, "old": c.old, "basis": c.basis} for c in device],
        "missing": [
            *missing,
            *(f"phase {phase}: no run met it" for phase in base.phases if (phase, None) not in samples),
        ],
        **beside,
        "profile": calibrated(base, constants, **measured, name=name),
    }


def _phases(base: HardwareProfile, lines: FittedLines) -> dict[str, dict[str, Any]]:
    """The line of each phase, with the base's and with those of its kinds of steps."""
    old = {name: {"a": line.a.value, "b": line.b.value} for name, line in base.phases.items()}
    phases: dict[str, dict[str, Any]] = {}
    for (name, kind), line in lines.items():
        if kind is None:
            phases[name] = {**line._asdict(), "old": old.get(name), "kinds": {}}
        else:
            phases[name]["kinds"][kind] = line._asdict()
    return phases


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
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    plan, probes = calibration_runs(given.batch_sizes, given.prompt_tokens), gathered(given.probes)
    found = calibrate(load("h200"), plan, probes, name=given.output.stem, rounds=1, notify=print)
    write_whole(given.output, to_yaml(found["profile"]))
    write_whole(given.output.with_suffix(".json"), json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
