"""``make gpu`` does without what a machine may lack."""

from __future__ import annotations

import subprocess
import sys

# Modules that are not there, whatever is installed.
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("scipy", "typer", "rich")))
from schedbench.profiles.lab import gpu, overhead, prediction_runs
"""


def test_the_plan_needs_neither_scipy_nor_the_command_lines_packages() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
