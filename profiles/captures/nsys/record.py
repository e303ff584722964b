"""Recording a scenario with Nsight Systems: the command, the environment it runs in, and what must have come of it.

Only the measured workload is captured, from a range of ours to its end, and the program runs on afterwards.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from ...cuda.nvtx_ranges import DOMAIN, MEASURE
from ...platform.machine import MachineError
from ...record.result import Result, RunPart
from .. import maps
from ..capture import ProfilerCapture
from ..measure import result
from .reader import open_export
from .scrub import scrub
from .tool import Nsys, exported, said

Graphs = Literal["graph", "node"]
NAME: Final = "capture"
_SECONDS: Final = 60  # that the tool may take to end
# A report holds the whole environment of its program: it gets what it needs, and nobody's keys.
_PASSED: Final = frozenset(
    {
        "HOME",
        "LANG",
        "PATH",
        "PYTHONPATH",
        "TMPDIR",
        "USER",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "OMP_NUM_THREADS",
    }
)
_PASSED_FAMILIES: Final = ("CUDA_", "LC_", "NVIDIA_", "PYTORCH_", "TORCH", "TRITON_")
_SECRET: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


class RecordingError(RuntimeError):
    """The program that was to be recorded failed."""


@dataclass(frozen=True, slots=True)
class RecordingRequest:
    """``arguments`` are the child's: scenario and overrides. ``graphs``: replayed graphs whole, or kernel by kernel,
    which costs more for every launch."""

    arguments: Sequence[str]
    device: Literal["cuda", "vgpu"]
    graphs: Graphs = "node"


def command(nsys: Nsys, order: RecordingRequest, report: Path, session: str) -> list[str]:
    """``report`` without its ending. ``session`` is what the tool calls the recording."""
    gpu = order.device == "cuda"
    return [
        *(str(nsys.path), "profile", f"--session-new={session}"),
        f"--trace={'cuda,nvtx,osrt' if gpu else 'nvtx'}",
        *("--sample=none", "--cpuctxsw=none"),
        *([f"--cuda-graph-trace={order.graphs}"] if gpu else []),
        *("--capture-range=nvtx", f"--nvtx-capture={MEASURE}@{DOMAIN}"),
        *("--capture-range-end=stop", "--kill=none"),
        "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0",
        *(f"--output={report}", "--force-overwrite=true"),
        *(sys.executable, "-m", "schedbench.profiles.ranks.recorded_child"),
        *(*order.arguments, "--device", order.device),
    ]


def record(nsys: Nsys, order: RecordingRequest, folder: Path, surroundings: Mapping[str, str]) -> Path:
    """Run it; the report that was written. Raises RecordingError where the program failed, MachineError where it did
    not but there is no report."""
    report = folder / NAME
    expected = report.with_name(f"{NAME}.nsys-rep")
    expected.unlink(missing_ok=True)
    session = f"schedbench-{os.getpid()}"
    done = _run(nsys, command(nsys, order, report, session), environment(surroundings), session)
    if expected.is_file():
        return expected
    if done.returncode:
        raise RecordingError(f"the run under nsys {nsys.version} failed: {said(done)}")
    raise MachineError(f"nsys {nsys.version} wrote no report, for its range never began: {unheard(nsys)}")


def _run(nsys: Nsys, words: list[str], env: dict[str, str], session: str) -> subprocess.CompletedProcess[str]:
    """The tool's daemon and its program outlive whoever started them: interrupted, they are told to end."""
    try:
        return subprocess.run(words, env=env, capture_output=True, text=True, errors="replace", check=False)
    except BaseException:
        end = [str(nsys.path), "shutdown", f"--session={session}", "--kill=sigkill"]
        subprocess.run(end, env=env, capture_output=True, timeout=_SECONDS, check=False)
        raise


def environment(surroundings: Mapping[str, str]) -> dict[str, str]:
    """What the program is given of this process's."""
    return {
        name: value
        for name, value in surroundings.items()
        if (name in _PASSED or name.startswith(_PASSED_FAMILIES))
        and not any(word in name for word in _SECRET)
    }


def check(capture: ProfilerCapture, nsys: Nsys) -> None:
    """Raises MachineError where our ranges did not arrive."""
    if not any(span.domain == DOMAIN for span in capture.spans):
        raise MachineError(f"the capture has none of our ranges: {unheard(nsys)}")


def unheard(nsys: Nsys) -> str:
    """Why that may be: since 0.2.12 nvtx asks a tool whether it listens, and Nsight Systems 2023.4 does not answer."""
    return (
        f"nsys {nsys.version} hears nothing of nvtx {metadata.version('nvtx')}; "
        "a newer Nsight Systems does, or nvtx 0.2.11 (pip install nvtx==0.2.11)"
    )


MAP = "schedbench"


def recorded(
    nsys: Nsys, order: RecordingRequest, folder: Path, surroundings: Mapping[str, str]
) -> tuple[Result, Path]:
    """The capture's document, and the report that lies in ``folder``, beside a scrubbed export of it.

    Raises RecordingError, CaptureError, and MachineError where the tool wrote nothing or heard nothing of us."""
    report = record(nsys, order, folder, surroundings)
    shared = report.with_suffix(".sqlite")
    with exported(nsys, report) as found:
        scrub(found, shared)
    with open_export(shared) as capture:
        check(capture, nsys)
        name = Path(order.arguments[0]).stem
        run = RunPart(id="", command="", started="", wall_s=0.0)
        return result(capture, maps.load(MAP), name=name, run=run), report
