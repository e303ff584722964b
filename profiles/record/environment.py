"""The machine and the program that a result was made with. Names no user, host or folder."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ... import __version__
from .provenance import Tool

_FOLDERS = ("cli", "profiles", "scenarios", "sched")  # of the package, in a checkout
_PACKAGES = ("torch", "triton", "nvtx", "numpy")


@cache
def tool() -> Tool:
    """The program; of a checkout also its commit, and the files that differed from it at the first call."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return Tool(version=__version__)
    changed = changes(root)
    contents = [file.read_bytes() for name in changed or () if (file := root / name).is_file()]
    return Tool(
        version=__version__,
        git_sha=run_git(root, "rev-parse", "HEAD"),
        dirty=None if changed is None else bool(changed),
        changed=changed or (),
        changed_sha256=hashlib.sha256(b"\0".join(contents)).hexdigest() if changed else None,
    )


def environment() -> dict[str, Any]:
    """Versions and processor. Machines add their device."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "cpu": _cpu(),
        **{name: found for name in _PACKAGES if (found := version(name))},
    }


@cache
def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def changes(root: Path) -> tuple[str, ...] | None:
    """The files of a checkout that differ from its commit, and the package's Python files that are in no commit; None
    where git cannot say. Other untracked files, such as a scenario or a result, change nothing that runs."""
    tracked = run_git(root, "diff", "--name-only", "HEAD")
    patterns = (f"{folder}/*.py" for folder in _FOLDERS)
    untracked = run_git(root, "ls-files", "--others", "--exclude-standard", "--", *patterns)
    if tracked is None or untracked is None:
        return None
    return *tracked.splitlines(), *untracked.splitlines()


def run_git(root: Path, *arguments: str) -> str | None:
    """What git prints about a repository; None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
