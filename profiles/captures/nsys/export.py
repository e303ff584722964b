"""A report of Nsight Systems as an sqlite export, made by the tool itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from ..capture import CaptureFileError
from .find import Nsys

_SECONDS: Final = 1800
_LONGEST: Final = 600  # letters of the tool's own words


@contextmanager
def exported(nsys: Nsys, report: Path) -> Iterator[Path]:
    """An export of ``report`` that is gone after the block: it holds what nobody should see. Raises CaptureError."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "export.sqlite"
        export(nsys, report, path)
        yield path


def export(nsys: Nsys, report: Path, output: Path) -> None:
    """Write ``report`` as sqlite. Raises CaptureError with the tool's own words where it does not."""
    arguments = [
        "export",
        "--type",
        "sqlite",
        "--force-overwrite",
        "true",
        "--output",
        str(output),
        str(report),
    ]
    try:
        done = subprocess.run(
            [str(nsys.path), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CaptureFileError(f"{report}: nsys {nsys.version} could not export it: {error}") from None
    if done.returncode or not output.is_file():
        raise CaptureFileError(f"{report}: nsys {nsys.version} could not export it: {said(done)}")


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The end of what a tool wrote, in one line."""
    words = " ".join((done.stderr.strip() or done.stdout.strip() or "nothing").split())
    return f"it ended with {done.returncode} and said: {words[-_LONGEST:]}"
