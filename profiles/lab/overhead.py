"""The cost of measuring: one workload, run alternately with and without an instrument in one process.

``python -m schedbench.profiles.lab.overhead SCENARIO --device D --sides bare timed --output FILE``. Sides:

    bare    no observers, torch's calls not replaced; the wall clock is read before and after
    timed   a timed pass: observers, two events per step, the clock around calls that may wait
    nvtx    a timed pass with NVTX ranges, which nvtx makes only if a tool receives them
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from ...scenarios.loader import load
from ..cuda.nvtx_ranges import NvtxRanges, listening
from ..judge.statistics import abba, estimate, paired
from ..platform.resolve import resolve
from ..record.files import write_whole
from ..run.machines import open_machine
from ..run.runner import GatedSink, PreparedRun

SIDES: Final[Mapping[str, Callable[[PreparedRun], float]]] = {
    "bare": lambda run: run.clocked(watched=False),
    "timed": lambda run: run.clocked(),
    "nvtx": lambda run: run.clocked(NvtxRanges()),
}
# Percent that the second side may take, with steps of a millisecond.
LIMITS: Final = {"timed": 1.0, "nvtx": 2.0}

NO_TOOL: Final = "no tool takes NVTX ranges from this process"


def compared(run: PreparedRun, sides: tuple[str, str], pairs: int) -> dict[str, Any]:
    """Run two sides alternately, ``pairs`` blocks of each, after one warm-up of each."""
    for side in sides:
        SIDES[side](run)
    steps = 0 if run.sink.collector is None else len(run.sink.collector.periods.periods) + 1
    order = [sides[which == "b"] for which in abba(pairs)]
    seconds = [SIDES[side](run) for side in order]
    by_side = {side: [s for name, s in zip(order, seconds, strict=True) if name == side] for side in sides}
    return overhead(sides, seconds, by_side, steps)


def overhead(
    sides: tuple[str, str], seconds: Sequence[float], by_side: Mapping[str, Sequence[float]], steps: int
) -> dict[str, Any]:
    """The document of a comparison. ``seconds`` are in the order of ``abba``."""
    effect, limit = estimate(paired(seconds)), LIMITS[sides[1]]
    before, after = (median(by_side[side]) for side in sides)
    return {
        "sides": list(sides),
        "pairs": len(seconds) // 2,
        "steps": steps,
        "step_ms": 1e3 * before / steps if steps else None,
        "percent": effect.median,
        "interval": list(effect.interval),
        "us_per_step": 1e6 * (after - before) / steps if steps else None,
        "bar_percent": limit,
        "met": True if effect.interval.high < limit else False if effect.interval.low > limit else None,
        "seconds": {side: list(values) for side, values in by_side.items()},
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run one workload alternately with and without an instrument."
    )
    parser.add_argument("scenario")
    parser.add_argument("--device", choices=("cuda", "vgpu"), required=True)
    parser.add_argument("--sides", nargs=2, choices=tuple(SIDES), required=True)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if the measured cost is not below its limit with its whole interval."""
    given, sink = parse(arguments), GatedSink()
    if "nvtx" in given.sides and not listening():
        write_whole(given.output, json.dumps({"sides": given.sides, "abstained": NO_TOOL}) + "\n")
        return 0
    resolved = resolve(load(given.scenario, given.set))
    with open_machine(given.device, resolved, sink) as machine:
        run = PreparedRun(resolved, machine, resolved.relays[0], sink)
        run.warm_up()
        found = compared(run, (given.sides[0], given.sides[1]), given.pairs)
        label = {"device": machine.hardware.name, "emulated": machine.labels.emulated}
    write_whole(given.output, json.dumps({**label, **found}, indent=1) + "\n")
    print(f"{found['percent']:+.2f} %, limit {found['bar_percent']:g} %")
    return 0 if machine.labels.emulated or found["met"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
