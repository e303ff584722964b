"""``python -m schedbench.profiles.cuda.probes NAME OUTPUT.json``"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from . import PROBES


def main(name: str, output: str) -> int:
    answer = importlib.import_module(PROBES[name]).probe()
    Path(output).write_text(json.dumps(answer, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
