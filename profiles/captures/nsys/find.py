"""Where Nsight Systems is: as told, on the PATH, or in the usual folders; and which one it is."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ...platform.machine import MachineError

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
_SECONDS: Final = 30
_VERSION: Final = re.compile(r"\d+(\.\d+)+[\w.\-]*")


class Nsys(NamedTuple):
    path: Path
    version: str


def find(told: str | None, surroundings: Mapping[str, str], *, root: Path = Path("/")) -> Nsys:
    """The one that was named, else the first that works: of the environment variable, the PATH, the usual folders.

    Raises MachineError, which says what to install.
    """
    named = told or surroundings.get(VARIABLE)
    if named:
        return _tried(Path(named)) or _refused(named)
    candidates = list(_candidates(surroundings, root))
    found = next((nsys for path in candidates if (nsys := _tried(path))), None)
    if found is None:
        tried = f" ({', '.join(map(str, candidates))} would not run)" if candidates else ""
        raise MachineError(f"no Nsight Systems on this machine{tried}: {HOW_TO_GET}")
    return found


def _refused(named: str) -> Nsys:
    raise MachineError(f"{named} is no nsys that runs: {HOW_TO_GET}")


def _candidates(surroundings: Mapping[str, str], root: Path) -> Iterator[Path]:
    """The newest of a folder's versions first."""
    on_path = shutil.which("nsys", path=surroundings.get("PATH", ""))
    if on_path:
        yield Path(on_path)
    for pattern in PLACES:
        yield from sorted(root.glob(pattern.removeprefix("/")), reverse=True)


def _tried(path: Path) -> Nsys | None:
    try:
        done = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    words = done.stdout or done.stderr
    match = _VERSION.search(words)
    itself = done.returncode == 0 and "nsight systems" in words.lower()
    return Nsys(path, match[0]) if itself and match else None
