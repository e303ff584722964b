"""What this machine can do, found by trying it.

CUDA is not initialised, because the virtual GPU cannot share a process with it.
"""

from __future__ import annotations

import os
from contextlib import closing
from importlib import metadata
from typing import NamedTuple

import torch

from ..captures.nsys.record import find
from ..engines.client import EngineFailedError, EngineProcess
from ..engines.names import EngineError
from ..platform import hardware
from ..platform.engine_choice import EngineChoice
from ..platform.machine import MachineError
from ..record.environment import environment
from ..vgpu.gpu import open_vgpu


class DoctorCheck(NamedTuple):
    """``runs``: whether this alone is enough to run a scenario."""

    name: str
    ok: bool
    detail: str
    runs: bool = False


def run_checks() -> list[DoctorCheck]:
    facts = environment()
    return [
        DoctorCheck("python", True, f"{facts['python']} on {facts['platform']}, {facts['cpu']}"),
        _package("torch"),
        _virtual_gpu(),
        DoctorCheck("CUDA", torch.cuda.is_available(), _cuda(), runs=True),
        _package("triton"),
        _package("nvtx"),
        _nsys(),
    ]


def engine_checks(choice: EngineChoice) -> list[DoctorCheck]:
    """What an engine of another project needs to run here, as far as the first that is missing."""
    try:
        engine = EngineProcess(choice)
    except EngineError as error:
        return [DoctorCheck("source", False, str(error), runs=True)]
    with closing(engine):
        source, part = engine.source, engine.source.part
        known = [part.version, part.commit and f"commit {part.commit[:10]}", part.dirty and "with changes"]
        facts = ", ".join(str(fact) for fact in known if fact) or "of unknown version"
        found = [DoctorCheck("source", True, f"{source.package}, {facts}")]
        try:
            engine.start()
        except (EngineError, EngineFailedError) as error:
            return [*found, DoctorCheck("import", False, str(error), runs=True)]
    found.append(DoctorCheck("import", True, f"{engine.import_s:.1f} s by {choice.python}", runs=True))
    if engine.hollow:
        found.append(DoctorCheck("absent", True, f"and not needed: {', '.join(engine.hollow)}"))
    if engine.threads:
        found.append(
            DoctorCheck("threads", False, f"of the import, which runs lack: {', '.join(engine.threads)}")
        )
    return found


def _package(name: str) -> DoctorCheck:
    try:
        return DoctorCheck(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        return DoctorCheck(name, False, "not installed")


def _nsys() -> DoctorCheck:
    """The nsys that profile and report use."""
    try:
        found = find(None, os.environ)
    except MachineError as error:
        return DoctorCheck("nsys", False, str(error))
    return DoctorCheck("nsys", True, f"{found.version}, {found.path}")


def _cuda() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} device(s), CUDA {torch.version.cuda}"
    return f"no device; torch is built {f'for CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}"


def _virtual_gpu() -> DoctorCheck:
    """Compute a sum on the virtual GPU."""
    profiles = hardware.names()
    try:
        with open_vgpu(hardware.load(profiles[0])) as gpu:
            total = int(torch.ones(4, dtype=torch.int64, device=gpu.device).sum().item())
        if total != 4:
            raise ArithmeticError(f"1 + 1 + 1 + 1 gave {total}")
    except Exception as error:
        return DoctorCheck("virtual GPU", False, f"{type(error).__name__}: {error}", runs=True)
    return DoctorCheck("virtual GPU", True, f"works; hardware {', '.join(profiles)}", runs=True)
