"""Runs one probe: ``python -m schedbench.profiles.lab.probes NAME OUTPUT.json``."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from ...record.files import write_whole
from . import PROBES


def main(name: str, output: str) -> int:
    measured = importlib.import_module(PROBES[name]).probe()
    write_whole(Path(output), json.dumps(measured, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
