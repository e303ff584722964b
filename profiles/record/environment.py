"""The machine and the program that a result was made with. Names no user, host or folder."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ... import __version__
from .provenance import Tool

_PACKAGES = ("torch", "triton", "nvtx", "numpy")


def tool() -> Tool:
    sha, dirty = _git()
    return Tool(version=__version__, git_sha=sha, dirty=dirty)


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


@cache
def _git() -> tuple[str | None, bool | None]:
    """The commit of the checkout that this process runs, and whether it had changes at the first call; None when
    installed as a package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None, None
    sha = _run_git(root, "rev-parse", "HEAD")
    status = _run_git(root, "status", "--porcelain")
    return (sha.strip() or None if sha is not None else None), (bool(status) if status is not None else None)


def _run_git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
