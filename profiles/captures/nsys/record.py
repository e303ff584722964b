"""Finds Nsight Systems on this machine, records a scenario with it, and exports its reports as sqlite.

Only the measured workload is captured, from the start to the end of its range; the program then runs to its end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal, NamedTuple

from ...cuda.nvtx_ranges import DOMAIN, MEASURE
from ...platform.machine import MachineError
from ...record.environment import version
from ...record.result import Result
from .. import maps
from ..capture import CaptureFileError, ProfilerCapture
from ..measure import result
from .reader import open_export, scrub

VARIABLE: Final = "SCHEDBENCH_NSYS"
PLACES: Final = (
    "/opt/nvidia/nsight-systems/*/bin/nsys",
    "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "/opt/nvidia/nsight-systems/*/target-linux-x64/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/usr/lib/nsight-systems/bin/nsys",
    "/usr/lib/nsight-systems/*/nsys",
)
HOW_TO_GET: Final = (
    "install Nsight Systems (developer.nvidia.com/nsight-systems, or on Debian the non-free package nsight-systems),"
    f" or name its nsys with --nsys or {VARIABLE}"
)
_VERSION_SECONDS: Final = 30
_VERSION: Final = re.compile(r"\d+(\.\d+)+[\w.\-]*")


class Nsys(NamedTuple):
    path: Path
    version: str


def find(nsys: str | None, environ: Mapping[str, str], *, root: Path = Path("/")) -> Nsys:
    """``nsys`` or the environment variable's, if given; else the first that works on the PATH or in the usual folders.

    Raises MachineError, which says what to install.
    """
    named = nsys or environ.get(VARIABLE)
    candidates = [Path(named)] if named else list(_candidates(environ, root))
    found = next((tool for path in candidates if (tool := _tried(path))), None)
    if found is None and named:
        raise MachineError(f"{named} is not an nsys that runs: {HOW_TO_GET}")
    if found is None:
        tried = f" ({', '.join(map(str, candidates))} would not run)" if candidates else ""
        raise MachineError(f"no Nsight Systems on this machine{tried}: {HOW_TO_GET}")
    return found


def _candidates(environ: Mapping[str, str], root: Path) -> Iterator[Path]:
    """In a folder of several versions, the newest first."""
    on_path = shutil.which("nsys", path=environ.get("PATH", ""))
    if on_path:
        yield Path(on_path)
    for pattern in PLACES:
        yield from sorted(root.glob(pattern.removeprefix("/")), reverse=True)


def _tried(path: Path) -> Nsys | None:
    try:
        done = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    words = done.stdout or done.stderr
    match = _VERSION.search(words)
    itself = done.returncode == 0 and "nsight systems" in words.lower()
    return Nsys(path, match[0]) if itself and match else None


_EXPORT_SECONDS: Final = 1800
_LONGEST: Final = 600  # characters of the tool's output in a message


@contextmanager
def exported(nsys: Nsys, report: Path) -> Iterator[Path]:
    """An sqlite export of ``report``, removed after the block because it holds private data. Raises CaptureFileError
    with the tool's output if the export fails."""
    error = f"{report}: nsys {nsys.version} could not export it"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "export.sqlite"
        options = ("--type", "sqlite", "--force-overwrite", "true", "--output", str(path))
        try:
            done = subprocess.run(
                [str(nsys.path), "export", *options, str(report)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_EXPORT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as reason:
            raise CaptureFileError(f"{error}: {reason}") from None
        if done.returncode or not path.is_file():
            raise CaptureFileError(f"{error}: {failure(done)}")
        yield path


def failure(done: subprocess.CompletedProcess[str]) -> str:
    """The exit code and the end of the output, in one line."""
    words = " ".join((done.stderr.strip() or done.stdout.strip() or "nothing").split())
    return f"exit code {done.returncode}: {words[-_LONGEST:]}"


Graphs = Literal["graph", "node"]
NAME: Final = "capture"
_SECONDS: Final = 60  # for the tool to end
# A report contains the environment of its program, which therefore gets only what it needs, and no secrets.
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
    """``arguments`` are the scenario and its overrides. ``graphs``: whether replayed graphs are recorded whole, or
    kernel by kernel, which makes each launch slower."""

    arguments: Sequence[str]
    device: Literal["cuda", "vgpu"]
    graphs: Graphs = "node"


def command(nsys: Nsys, request: RecordingRequest, report: Path, session: str) -> list[str]:
    """``report`` has no suffix. ``session`` is the tool's name for the recording."""
    gpu = request.device == "cuda"
    return [
        *(str(nsys.path), "profile", f"--session-new={session}"),
        f"--trace={'cuda,nvtx,osrt' if gpu else 'nvtx'}",
        *("--sample=none", "--cpuctxsw=none"),
        *([f"--cuda-graph-trace={request.graphs}"] if gpu else []),
        *("--capture-range=nvtx", f"--nvtx-capture={MEASURE}@{DOMAIN}"),
        *("--capture-range-end=stop", "--kill=none"),
        "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0",
        *(f"--output={report}", "--force-overwrite=true"),
        *(sys.executable, "-m", "schedbench.profiles.lab.single_run"),
        # One pass without CUPTI, which serves only one tool at a time.
        *(*request.arguments, "--device", request.device, "--timed"),
    ]


def record(nsys: Nsys, request: RecordingRequest, folder: Path, environ: Mapping[str, str]) -> Path:
    """Run the scenario and return the report. Raises RecordingError if the program failed, MachineError if it did not
    and there is no report."""
    report = folder / NAME
    expected = report.with_name(f"{NAME}.nsys-rep")
    expected.unlink(missing_ok=True)
    session = f"schedbench-{os.getpid()}"
    done = _run(nsys, command(nsys, request, report, session), environment(environ), session)
    if expected.is_file():
        return expected
    if done.returncode:
        raise RecordingError(f"the run under nsys {nsys.version} failed: {failure(done)}")
    raise MachineError(
        f"nsys {nsys.version} wrote no report, because the range of the workload did not arrive: {no_ranges(nsys)}"
    )


def _run(nsys: Nsys, words: list[str], env: dict[str, str], session: str) -> subprocess.CompletedProcess[str]:
    """Run the tool. Its daemon and program do not end with this process, so an interrupt shuts them down."""
    try:
        return subprocess.run(words, env=env, capture_output=True, text=True, errors="replace", check=False)
    except BaseException:
        end = [str(nsys.path), "shutdown", f"--session={session}", "--kill=sigkill"]
        subprocess.run(end, env=env, capture_output=True, timeout=_SECONDS, check=False)
        raise


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of this process's environment that the program gets."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _PASSED or name.startswith(_PASSED_FAMILIES))
        and not any(word in name for word in _SECRET)
    }


def check(capture: ProfilerCapture, nsys: Nsys) -> None:
    """Raises MachineError if the capture has no ranges of the scheduler."""
    if not any(span.domain == DOMAIN for span in capture.spans):
        raise MachineError(f"the capture has no ranges of schedbench: {no_ranges(nsys)}")


def no_ranges(nsys: Nsys) -> str:
    """Why ranges may be missing: since 0.2.12 nvtx asks the tool whether it is attached, and Nsight Systems 2023.4 does
    not answer."""
    if (found := version("nvtx")) is None:
        return "nvtx, which makes them, is not installed (pip install nvtx)"
    remedy = "install a newer Nsight Systems, or nvtx 0.2.11 (pip install nvtx==0.2.11)"
    return f"nsys {nsys.version} receives no ranges of nvtx {found}; {remedy}"


MAP = "schedbench"


def recorded(
    nsys: Nsys, request: RecordingRequest, folder: Path, environ: Mapping[str, str]
) -> tuple[Result, Path]:
    """Record a scenario; returns the capture's document and the report. Both the report and a scrubbed export of it are
    in ``folder``. Raises RecordingError, CaptureFileError, and MachineError if there is no report, or no ranges in
    it."""
    report = record(nsys, request, folder, environ)
    shared = report.with_suffix(".sqlite")
    with exported(nsys, report) as found:
        scrub(found, shared)
    with open_export(shared) as capture:
        check(capture, nsys)
        return result(capture, maps.load(MAP), name=Path(request.arguments[0]).stem), report
