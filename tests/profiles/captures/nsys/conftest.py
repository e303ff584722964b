"""A stand-in for nsys: a shell script that behaves like it as far as documented, and writes a synthetic export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.profiles.captures.exports import Export, own_loop

# The script writes its arguments to ``arguments``; a test gives its output and exit code.
_SCRIPT = """#!/bin/sh
echo "$@" >> "{folder}/arguments"
if [ "$1" = --version ]; then echo "NVIDIA Nsight Systems version {version}"; exit 0; fi
for word in "$@"; do
  case $word in --output=*) output=${{word#--output=}};; esac
  case $previous in --output) output=$word;; esac
  previous=$word
done
if [ "$1" = export ]; then {export}; exit 0; fi
env > "{folder}/environment"
{profile}
"""

Fake = Callable[..., Path]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """Returns a function that writes the script and returns its path."""

    def making(
        place: str = "bin/nsys",
        *,
        version: str = "2025.1.1.1-1",
        profile: str = 'echo report > "$output.nsys-rep"',
        ranges: bool = True,
        export: str | None = None,
    ) -> Path:
        capture = Export("new")
        if ranges:
            own_loop(capture)
        made_up = capture.write(tmp_path / "made-up.sqlite")
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        copied = export or f'cp "{made_up}" "$output"'
        path.write_text(_SCRIPT.format(folder=tmp_path, version=version, profile=profile, export=copied))
        path.chmod(0o755)
        return path

    return making
