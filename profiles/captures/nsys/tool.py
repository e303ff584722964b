"""Finds Nsight Systems on this machine, and exports its reports as sqlite."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from ...platform.machine import MachineError
from ..capture import CaptureFileError

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
