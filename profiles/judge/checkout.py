"""Another version of this program, in a temporary git worktree of the running checkout."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .remote import SideError

SOURCES: Final = ".typing"  # the folder of a checkout that has the package under its own name


def here() -> Path:
    """The checkout that this program runs from. Raises SideError where it was installed without one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not (root / SOURCES).exists():
        raise SideError("git:REF needs schedbench to run from a checkout of its repository")
    return root


@contextmanager
def worktree(root: Path, ref: str) -> Iterator[Path]:
    """A folder with the sources of ``ref``. Raises SideError when there is no such commit."""
    commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}", ref=ref)
    with tempfile.TemporaryDirectory(prefix="schedbench-") as folder:
        tree = Path(folder) / "checkout"
        try:
            _git(root, "worktree", "add", "--detach", str(tree), commit.strip(), ref=ref)
            yield tree
        finally:
            _git(root, "worktree", "remove", "--force", str(tree), ref=ref, must=False)
            _git(root, "worktree", "prune", ref=ref, must=False)


def _git(root: Path, *arguments: str, ref: str, must: bool = True) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    if must and done.returncode:
        raise SideError(f"git:{ref}: {done.stderr.strip() or 'no such commit'}")
    return done.stdout
