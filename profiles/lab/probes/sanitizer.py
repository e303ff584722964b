"""Does torch's CUDA sanitizer find a missing wait (it should), and a pinned buffer written too early (it cannot)?"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, Final

CASES: Final = ("correct", "missing_wait", "pinned_overwrite")
_SECONDS = 30


def probe() -> dict[str, Any]:  # cuda-only
    return {case: _run(case) for case in CASES}


def _run(case: str) -> dict[str, Any]:  # cuda-only
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    package = __name__.rpartition(".")[0]
    done = subprocess.run(
        [sys.executable, "-m", f"{package}.sanitized", case],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=environment,
        check=False,
    )
    return judged(done.returncode, done.stderr)


def judged(code: int, text: str) -> dict[str, Any]:
    """What the sanitizer said. It prints the race, then raises."""
    found = "CSAN" in text or "data race" in text.lower()
    return {"exit_code": code, "found": found, "text": text[-1500:] if code or found else ""}
