"""``make gpu`` runs on a machine without optional packages."""

from __future__ import annotations

import subprocess
import sys

# Modules whose import fails even if they are installed.
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("scipy", "typer", "rich")))
from schedbench.profiles.lab import gpu, overhead, prediction_runs
"""


def test_the_plan_imports_neither_scipy_nor_packages_of_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
