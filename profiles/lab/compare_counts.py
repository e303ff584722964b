"""Compares two runs' counts line by line: the virtual GPU's and CUPTI's.

Lines are matched by file, function and statement, range, and kind of call. Kernels are not compared, nor are copies
within the device during a forward: where a fused kernel is missing, torch launches several of both.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...sched.observe import RANGES
from ..measure.steps import OUTSIDE
from ..record.files import write_whole
from ..record.result import CopyRow, Result, SitePart, SyncRow, read

COMPARED: Final = ("h2d", "d2h", "sync")


class CountedLine(NamedTuple):
    """``what`` is like ``h2d pageable blocking`` for copies, and the call's name for syncs."""

    kind: str
    stream: str
    range: str
    file: str
    function: str
    statement: str
    what: str


class CountAndBytes(NamedTuple):
    times: float
    bytes: float


class CountDifference(NamedTuple):
    """``a`` and ``b`` are counts of the whole run, or per step if the runs have different numbers of steps."""

    line: CountedLine
    a: float
    b: float


class StepDifference(NamedTuple):
    """``a`` and ``b`` are (median, max) per step of the kind; zeros if a run has no such step."""

    kind: str
    stream: str
    counter: str
    a: tuple[float, int]
    b: tuple[float, int]


class CountComparison(NamedTuple):
    """``steps`` are the kinds whose numbers of steps differ, as (a, b); if there are any, lines are compared per
    step."""

    lines: tuple[CountDifference, ...]
    per_step: tuple[StepDifference, ...]
    steps: dict[str, tuple[int, int]]
    compared: int  # lines that either run has

    @property
    def equal(self) -> bool:
        return not (self.lines or self.per_step or self.steps)

    def document(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        return {
            "equal": self.equal,
            "compared": self.compared,
            "steps": self.steps,
            "lines": [{**d.line._asdict(), "a": d.a, "b": d.b} for d in self.lines],
            "per_step": [d._asdict() for d in self.per_step],
        }


def compare_counts(a: Result, b: Result) -> CountComparison:
    """Counts that belong to no step are left out."""
    steps_a, steps_b = _steps(a), _steps(b)
    unlike = {
        kind: (steps_a.get(kind, 0), steps_b.get(kind, 0))
        for kind in sorted({*steps_a, *steps_b})
        if steps_a.get(kind, 0) != steps_b.get(kind, 0)
    }
    lines_a, lines_b = _counts(a), _counts(b)
    if unlike:
        lines_a, lines_b = _per_step(lines_a, steps_a), _per_step(lines_b, steps_b)
    lines = sorted({*lines_a, *lines_b})
    differences = (CountDifference(line, lines_a.get(line, 0), lines_b.get(line, 0)) for line in lines)
    return CountComparison(
        lines=tuple(difference for difference in differences if difference.a != difference.b),
        per_step=tuple(_step_differences(a, b)),
        steps=unlike,
        compared=len(lines),
    )


def _steps(result: Result) -> dict[str, int]:
    return {kind: counts.steps for kind, counts in result.per_step.items()}


def counted_lines(result: Result) -> dict[CountedLine, CountAndBytes]:
    """Copies and syncs of the whole run that belong to a step, without copies within the device during forwards."""
    counts: Counter[CountedLine] = Counter()
    sizes: Counter[CountedLine] = Counter()
    for copy in result.copies:
        outside_forward = copy.direction == "d2d" and RANGES.get(copy.range) != "forward"
        if copy.kind != OUTSIDE and (copy.direction in COMPARED or outside_forward):
            words = (copy.direction, copy.host_memory, "blocking" if copy.blocking else "")
            line = _line(copy, " ".join(word for word in words if word))
            counts[line] += copy.count
            sizes[line] += copy.bytes
    for sync in result.syncs:
        if sync.kind != OUTSIDE and sync.sync:
            counts[_line(sync, sync.call)] += sync.count
    return {line: CountAndBytes(count, sizes[line]) for line, count in counts.items()}


def _line(row: CopyRow | SyncRow, what: str) -> CountedLine:
    site = row.site or SitePart(file="", function="", line=0, statement="")
    return CountedLine(row.kind, row.stream, row.range, site.file, site.function, site.statement, what)


def _counts(result: Result) -> dict[CountedLine, float]:
    return {line: tally.times for line, tally in counted_lines(result).items()}


def _per_step(lines: Mapping[CountedLine, float], steps: Mapping[str, int]) -> dict[CountedLine, float]:
    return {line: round(count / steps[line.kind], 6) for line, count in lines.items() if line.kind in steps}


def _step_differences(a: Result, b: Result) -> Iterator[StepDifference]:
    tallies_a, tallies_b = _tallies(a), _tallies(b)
    for place in sorted({*tallies_a, *tallies_b}):
        x, y = tallies_a.get(place, (0.0, 0)), tallies_b.get(place, (0.0, 0))
        if x != y:
            yield StepDifference(*place, x, y)


def _tallies(result: Result) -> dict[tuple[str, str, str], tuple[float, int]]:
    return {
        (kind, stream, counter): (tally.median, tally.max)
        for kind, counts in result.per_step.items()
        for stream, counters in counts.streams.items()
        for counter, tally in counters.items()
        if counter in COMPARED
    }


def main(arguments: Sequence[str]) -> int:
    """``A.json B.json OUTPUT.json``. Returns 1 if the counts differ, or if there are none."""
    a, b, output = map(Path, arguments)
    found = compare_counts(read(a), read(b))
    write_whole(output, json.dumps(found.document(), indent=1) + "\n")
    print(
        f"{len(found.lines)} of {found.compared} lines differ, and {len(found.steps)} kinds of steps in number"
    )
    return 0 if found.equal and found.compared else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
