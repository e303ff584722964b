"""A toy engine's repository, built in a folder."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(folder: Path, *arguments: str) -> str:
    """Git with an author, and without the settings of the user."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def write_package(folder: Path, text: str, *, version: str = "1.0") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (folder / "loop.py").write_text(text)


def checkout(folder: Path, text: str) -> str:
    """A repository whose only commit has the package ``toy`` in ``python/``; returns the commit."""
    write_package(folder / "python" / "toy", text)
    git(folder, "init", "-q")
    (folder / "README.md").write_text("a toy")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    git(folder, "tag", "v1")
    return git(folder, "rev-parse", "HEAD")
