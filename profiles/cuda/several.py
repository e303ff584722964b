"""One scenario under several states of the relay in one process: ``python -m schedbench.profiles.cuda.several``.

Timed only, one result per state. A process that starts up and compiles once has time for the whole ladder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...scenarios.loader import load
from ..run.crash import BrokenRunError
from ..run.execute import Options, execute
from ..run.resolve import Resolved, resolve
from .prediction import file


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run one scenario under several states of the relay.")
    parser.add_argument("scenario")
    parser.add_argument("--states", nargs="+", required=True)
    parser.add_argument("--device", choices=("cuda", "vgpu"), required=True)
    parser.add_argument("--side", choices=("measured", "emulated"), required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--hardware", type=Path, help="a profile that a stage before this one writes")
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args(arguments)


def questions(given: argparse.Namespace, hardware: Sequence[str] = ()) -> Iterator[tuple[str, Resolved]]:
    """By state. Raises ScenarioError."""
    for state in given.states:
        yield state, resolve(load(given.scenario, [*given.set, *hardware, f"engine.relay={state}"]))


def main(arguments: Sequence[str]) -> int:
    """1 when a state broke down; the others have run."""
    given, broke = parse(arguments), []
    hardware = [] if given.hardware is None else [f"device.hardware={given.hardware.resolve()}"]
    for state, question in questions(given, hardware):
        options = Options(device=given.device, traced=False, command=" ".join(arguments))
        try:
            result = execute(question, question.relays[0], options).result
        except (RuntimeError, ValueError, BrokenRunError) as error:
            broke.append(f"{state}: {error}")
        else:
            result.write(given.folder / f"{file(given.scenario, state, given.side)}.json")
    print("\n".join(broke), end="", flush=True)
    return 1 if broke else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
