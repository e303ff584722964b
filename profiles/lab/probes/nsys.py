"""Is there a Nsight Systems on this machine, and with it the importer that turns captures into reports?"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

PLACES: Final = ("/opt/nvidia", "/usr/local/cuda", "/usr/lib/nsight-systems", "/opt/nsight-systems")
_NAMES: Final = ("nsys", "QdstrmImporter", "nsys-ui")
_SECONDS = 20


def probe() -> dict[str, Any]:
    files = sorted(str(path) for path in found(map(Path, PLACES)))
    tools = sorted(
        {*(path for path in files if path.endswith("/nsys")), *filter(None, [shutil.which("nsys")])}
    )
    return {
        "on_path": shutil.which("nsys"),
        "files": files,
        "versions": {tool: version(tool) for tool in tools},
    }


def found(places: Iterable[Path]) -> Iterator[Path]:
    """Files of Nsight Systems under the places that there are."""
    for place in places:
        for folder, _, names in os.walk(place):
            yield from (Path(folder, name) for name in names if name in _NAMES or "QdstrmImporter" in name)


def version(tool: str) -> str:
    """Its own words, or why there are none."""
    try:
        done = subprocess.run(
            [tool, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout or done.stderr).strip()[:200]
