"""Pages as a browser shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def opened(page: Path | str, script: str, width: int = 1200) -> tuple[Any, list[str]]:
    """Open a file or an address in a process of its own; what the script assigns to ``document.found``, and the lines
    that the console printed. Skips where the system lacks a library that Qt's Chromium needs, such as libnss3."""
    browser = [sys.executable, str(Path(__file__).with_name("browser.py")), str(page), str(width)]
    done = subprocess.run(browser, input=script, capture_output=True, text=True, timeout=300, check=False)
    if "cannot open shared object file" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert not done.returncode, done.stderr
    answer = json.loads(done.stdout)
    return answer["found"], answer["console"]
