"""One run in a process of its own: ``python -m schedbench.profiles.lab.one SCENARIO --device D --output FILE``.

CUDA and the virtual GPU cannot live in one process, and a run that dies must not take others along.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ...scenarios.loader import load
from ..platform.resolve import Resolved, resolve
from ..ranks.execute import Options, execute


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run one scenario and write its result.")
    parser.add_argument("scenario")
    parser.add_argument("--device", choices=("cuda", "vgpu"), required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--timed", action="store_true", help="without a second pass that counts")
    parser.add_argument("--hardware", type=Path, help="a profile that a stage before this one writes")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


def question(given: argparse.Namespace) -> Resolved:
    """As far as it can be known before other stages have run. Raises ScenarioError."""
    return resolve(load(given.scenario, given.set))


def main(arguments: Sequence[str]) -> int:
    given = parse(arguments)
    hardware = [] if given.hardware is None else [f"device.hardware={given.hardware.resolve()}"]
    resolved = resolve(load(given.scenario, [*given.set, *hardware]))
    command = " ".join(arguments)
    options = Options(device=given.device, save_tokens=True, command=command, traced=not given.timed)
    result = execute(resolved, resolved.relays[0], options).result
    result.write(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
