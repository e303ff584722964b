"""Runs one scenario: ``python -m schedbench.profiles.lab.single_run SCENARIO --device D [--output FILE]``.

It runs in a process of its own because CUDA and the virtual GPU cannot share one, and because a run that crashes must
not end other stages. With ``--counted`` the run is counted from inside the process, and what is written are counts by
source line instead of a result. Kernels are left out of such counts, and copies within the device during a forward:
where a fused kernel is missing, torch launches several of both.

With ``--sides A B`` the cost of an instrument is measured: the workload runs alternately with and without it.

    bare    no observers, torch's calls not replaced; the wall clock is read before and after
    timed   a timed pass: observers, two events per step, the clock around calls that may wait
    nvtx    a timed pass with NVTX ranges, which nvtx makes only if a tool receives them
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch

from ... import sched
from ...sched.observe import RANGES
from ..cuda.dispatch_counts import DispatchCounter
from ..cuda.nvtx_ranges import NvtxRanges, listening
from ..judge.effects import rows_of_steps
from ..judge.statistics import abba, estimate, paired
from ..measure.steps import OUTSIDE
from ..platform.resolve import Resolved, ask
from ..ranks.execute import Options, execute
from ..record.files import write_whole
from ..record.result import CopyRow, Result, SitePart, SyncRow
from ..record.timeline import NO_SITE, Site
from ..run.gpu_stages import GpuStage
from ..run.machines import device_kind, open_machine
from ..run.runner import GatedSink, PreparedRun
from ..vgpu.sites import Sites


class CountedLine(NamedTuple):
    """``what`` is like ``h2d pageable blocking`` for copies, and the call's name for syncs."""

    kind: str
    stream: str
    range: str
    file: str
    function: str
    statement: str
    what: str


Counted = dict[CountedLine, dict[str, float]]
"""``count`` and ``bytes`` of each line."""


def no_counts() -> Counted:
    """Lines without counts, to which any line can be added."""
    return defaultdict(lambda: {"count": 0, "bytes": 0})


def counted_lines(result: Result) -> Counted:
    """Copies and syncs of the whole run that belong to a step, without copies within the device during forwards."""
    found = no_counts()
    for _, row in rows_of_steps(result):
        if isinstance(row, SyncRow):
            is_counted, size = row.sync, 0
        else:
            outside_forward = row.direction == "d2d" and RANGES.get(row.range) != "forward"
            is_counted, size = row.direction in ("h2d", "d2h") or outside_forward, row.bytes
        if is_counted:
            found[_line(row)]["count"] += row.count
            found[_line(row)]["bytes"] += size
    return found


def _line(row: CopyRow | SyncRow) -> CountedLine:
    site = row.site or SitePart(file="", function="", line=0, statement="")
    return CountedLine(row.kind, row.stream, row.range, site.file, site.function, site.statement, row.what)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run one scenario and write its result.")
    parser.add_argument("scenario")
    parser.add_argument("--device", choices=("cuda", "vgpu"), required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--timed", action="store_true", help="without a second pass that counts")
    parser.add_argument(
        "--counted", action="store_true", help="count from inside the process; nothing is timed"
    )
    parser.add_argument(
        "--sides", nargs=2, choices=tuple(SIDES), help="run alternately with and without an instrument"
    )
    parser.add_argument("--pairs", type=int, default=10, help="blocks of each side")
    parser.add_argument(
        "--output", type=Path, help="the result, or the counts; without it nothing is written"
    )
    given = parser.parse_args(arguments)
    if given.sides and (given.sides[1] not in LIMITS or given.sides[0] == given.sides[1]):
        parser.error(f"--sides: the second is one of {', '.join(LIMITS)}, and the first another one")
    if given.output is None and (given.counted or given.sides):
        parser.error("--counted and --sides need --output")
    return given


def run_stage(
    name: str, folder: Path, scenario: str, device: str, words: Iterable[str], deadline: float
) -> GpuStage:
    """The stage that runs a scenario; ``words`` are more options. ``NAME.json`` in the folder gets what it writes."""
    output = ("--output", str(folder / f"{name}.json"))
    return GpuStage(name, ("-m", __name__, scenario, "--device", device, *words, *output), deadline)


def set_options(overrides: Iterable[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def counted(question: Resolved, device: str) -> dict[str, Any]:
    """A document with rows of counts and bytes, and the number of steps of each kind."""
    sink = GatedSink()
    kind = device_kind("cuda" if device == "cuda" else "vgpu", question.scenario)
    with open_machine(kind, question, sink) as machine:
        run = PreparedRun(question, machine, sink)
        run.warm_up()
        module: Any = torch.get_device_module(machine.device)
        sites = Sites([Path(folder) for folder in sched.__path__])
        inline = round(question.hardware.copies.pageable_inline.value)
        counter = DispatchCounter(module, machine.device.type, sites, inline=inline)
        with counter.installed():
            run.measure(lambda *_: nullcontext(counter))
        streams = run.scheduler.engine.streams
        in_order = ("copy", "forward", "schedule")  # where all three are one stream, it keeps the last name
        names = {int(getattr(streams, name).stream_id): name for name in in_order}
    return counts_document(counter, names)


def counts_document(counter: DispatchCounter, streams: dict[int, str]) -> dict[str, Any]:
    """Plain dicts and lists. Calls that belong to no step are left out."""
    found, sites = no_counts(), counter.sites
    for key, count in counter.counts.items():
        kind = counter.kinds.get(key.step, OUTSIDE)
        if kind == OUTSIDE:
            continue
        site = Site("", "", 0, "") if key.site == NO_SITE else sites[key.site]
        stream = streams.get(key.stream, "default")
        line = CountedLine(kind, stream, key.range, site.file, site.function, site.statement, key.what)
        found[line]["count"] += count
        found[line]["bytes"] += counter.bytes[key]
    return {
        "steps": dict(sorted(Counter(counter.kinds.values()).items())),
        "rows": [{**line._asdict(), **found[line]} for line in sorted(found)],
    }


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
    seconds = [SIDES[sides[which == "b"]](run) for which in abba(pairs)]
    return overhead(sides, seconds, steps)


def overhead(sides: tuple[str, str], seconds: Sequence[float], steps: int) -> dict[str, Any]:
    """The document of a comparison. ``seconds`` are in the order of ``abba``."""
    effect, limit = estimate(paired(seconds)), LIMITS[sides[1]]
    order = abba(len(seconds) // 2)
    by_side = [[s for which, s in zip(order, seconds, strict=True) if which == side] for side in "ab"]
    before, after = map(median, by_side)
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
        "seconds": dict(zip(sides, by_side, strict=True)),
    }


def costs(question: Resolved, given: argparse.Namespace) -> int:
    """Compare two sides and write the document. Returns the exit code."""
    if "nvtx" in given.sides and not listening():
        write_whole(given.output, json.dumps({"sides": given.sides, "abstained": NO_TOOL}) + "\n")
        return 0
    sink = GatedSink()
    with open_machine(given.device, question, sink) as machine:
        run = PreparedRun(question, machine, sink)
        run.warm_up()
        found = compared(run, (given.sides[0], given.sides[1]), given.pairs)
        label = {"device": machine.hardware.name, "emulated": machine.labels.emulated}
    write_whole(given.output, json.dumps({**label, **found}, indent=1) + "\n")
    print(f"{found['percent']:+.2f} %, limit {found['bar_percent']:g} %")
    return 0 if machine.labels.emulated or found["met"] else 1


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if the measured cost of an instrument is not below its limit with its whole interval."""
    given = parse(arguments)
    question = ask(given.scenario, given.set)
    if given.sides:
        return costs(question, given)
    if given.counted:
        write_whole(given.output, json.dumps(counted(question, given.device), indent=1) + "\n")
        return 0
    command = " ".join(arguments)
    options = Options(device=given.device, save_tokens=True, command=command, traced=not given.timed)
    result = execute(question, options)
    if given.output:
        result.write(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
