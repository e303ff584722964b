"""Runs one scenario: ``python -m schedbench.profiles.lab.single_run SCENARIO --device D --output FILE``.

It runs in a process of its own because CUDA and the virtual GPU cannot share one, and because a run that crashes must
not end other stages.
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
    parser.add_argument("--hardware", type=Path, help="a hardware profile that an earlier stage writes")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


def resolved(given: argparse.Namespace, more: Sequence[str] = ()) -> Resolved:
    """The scenario with its overrides and ``more``. Raises ScenarioError."""
    return resolve(load(given.scenario, [*given.set, *more]))


def hardware_override(path: Path | None) -> list[str]:
    return [] if path is None else [f"device.hardware={path.resolve()}"]


def main(arguments: Sequence[str]) -> int:
    given = parse(arguments)
    question = resolved(given, hardware_override(given.hardware))
    command = " ".join(arguments)
    options = Options(device=given.device, save_tokens=True, command=command, traced=not given.timed)
    execute(question, question.relays[0], options).result.write(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
