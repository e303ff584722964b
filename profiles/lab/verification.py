"""Differences between prediction, in-process counters and CUPTI that are known, each with its reason.

A difference that no row explains makes ``verify`` fail. A row says where it applies by fields that are compared as they
stand; None fits everything. ``missing`` names the sources that may have less than the others.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ...sched.observe import RANGES
from ..measure.steps import OUTSIDE, STEADY
from ..record.files import write_whole
from ..record.result import Result, read
from .compare_counts import CountedLine, copy_line, line_of

Source = Literal["predicted", "announced", "recorded"]


@dataclass(frozen=True, slots=True)
class SourceDifference:
    """One line or counter that the sources disagree about; None from a source that does not count such things."""

    kind: str  # of step
    stream: str
    what: str  # its first word is the direction, sync call or counter
    category: str  # of the range: schedule, forward, copy; "" for counters per step
    predicted: float | None
    announced: float | None
    recorded: float | None

    def of(self, source: Source) -> float | None:
        value: float | None = getattr(self, source)
        return value


@dataclass(frozen=True, slots=True)
class Explanation:
    name: str
    reason: str
    what: str
    missing: frozenset[Source]
    category: str | None = None

    def covers(self, difference: SourceDifference) -> bool:
        """Whether this is such a difference: of that kind, and with the sources that may have less having it."""
        if difference.what.partition(" ")[0] != self.what:
            return False
        if self.category is not None and difference.category != self.category:
            return False
        told = {name: difference.of(name) for name in ("predicted", "announced", "recorded")}
        counts = {value for value in told.values() if value is not None}
        most = max(counts)
        return len(counts) > 1 and all(
            value in (None, most) or name in self.missing for name, value in told.items()
        )


EXPLANATIONS: Final[Sequence[Explanation]] = (
    Explanation(
        "kernels of one op",
        "the virtual GPU counts an op once; on CUDA sampling, split decodes, a draft's candidates and the indexer's "
        "choice are two or three kernels, and an op without one of its own is torch's many",
        what="kernel",
        missing=frozenset(("predicted",)),
    ),
    Explanation(
        "copies inside a forward",
        "an op without a kernel of its own copies within the device as torch's stand-ins do; fused, it copies nothing",
        what="d2d",
        category="forward",
        missing=frozenset(("predicted",)),
    ),
)


def explanation(difference: SourceDifference) -> Explanation | None:
    return next((one for one in EXPLANATIONS if one.covers(difference)), None)


_DIRECTIONS: Final = ("h2d", "d2h")  # that the process itself announces


class CountAndBytes(NamedTuple):
    times: float
    bytes: float


NOTHING: Final = CountAndBytes(0, 0)
Lines = Mapping[CountedLine, CountAndBytes]


class VerifiedRow(NamedTuple):
    """``announced`` is None for what the process does not count; ``why`` names the explanation of a difference."""

    line: CountedLine
    predicted: CountAndBytes
    announced: CountAndBytes | None
    recorded: CountAndBytes
    why: str

    @property
    def agrees(self) -> bool:
        return self.predicted == self.recorded and self.announced in (None, self.predicted)


class Verification(NamedTuple):
    """``steps``: of each kind, as (predicted, announced, recorded). ``trouble``: why the comparison as a whole does not
    hold, whatever the rows say."""

    rows: tuple[VerifiedRow, ...]
    steps: dict[str, tuple[int, int, int]]
    trouble: tuple[str, ...]

    @property
    def explained(self) -> tuple[VerifiedRow, ...]:
        return tuple(row for row in self.rows if not row.agrees and row.why)

    @property
    def unexplained(self) -> tuple[VerifiedRow, ...]:
        return tuple(row for row in self.rows if not row.agrees and not row.why)

    @property
    def unlike(self) -> dict[str, tuple[int, int, int]]:
        """Kinds of which the runs had not the same number of steps."""
        return {kind: counts for kind, counts in self.steps.items() if len(set(counts)) > 1}

    @property
    def agrees(self) -> bool:
        """Nothing is left that is not explained."""
        return not (self.unexplained or self.unlike or self.trouble)


def verify(predicted: Result, announced: Mapping[str, Any], recorded: Result) -> Verification:
    """``announced``: the document of ``counted``."""
    p, r = _lines(predicted), _lines(recorded)
    a = {
        CountedLine(*(row[name] for name in CountedLine._fields)): CountAndBytes(row["count"], row["bytes"])
        for row in announced["rows"]
    }
    rows = [
        _row(
            line,
            p.get(line, NOTHING),
            a.get(line, NOTHING) if _announces(line) else None,
            r.get(line, NOTHING),
        )
        for line in sorted({*p, *a, *r})
    ]
    rows += [_row(line, x, None, y) for line, x, y in _per_step(predicted, recorded)]
    return Verification(
        tuple(rows), _steps(predicted, announced, recorded), tuple(_trouble(predicted, recorded))
    )


def _row(
    line: CountedLine, predicted: CountAndBytes, announced: CountAndBytes | None, recorded: CountAndBytes
) -> VerifiedRow:
    row = VerifiedRow(line, predicted, announced, recorded, "")
    if row.agrees:
        return row
    counts = (tally if tally is None else tally.times for tally in (predicted, announced, recorded))
    found = explanation(
        SourceDifference(line.kind, line.stream, line.what, RANGES.get(line.range, ""), *counts)
    )
    return row if found is None else row._replace(why=found.name)


def _announces(line: CountedLine) -> bool:
    """Whether the process itself counts such things: not what stays within the device."""
    return line.what.partition(" ")[0] not in ("d2d", "memset")


def _lines(result: Result) -> Lines:
    """Over the whole run, of step kinds only. Copies within the device during forwards are counted per step."""
    counts: Counter[CountedLine] = Counter()
    sizes: Counter[CountedLine] = Counter()
    for copy in result.copies:
        inside = copy.direction == "d2d" and RANGES.get(copy.range) != "forward"
        if copy.kind != OUTSIDE and (copy.direction in _DIRECTIONS or inside):
            counts[copy_line(copy)] += copy.count
            sizes[copy_line(copy)] += copy.bytes
    for sync in result.syncs:
        if sync.kind != OUTSIDE and sync.sync:
            counts[line_of(sync, sync.call)] += sync.count
    return {line: CountAndBytes(count, sizes[line]) for line, count in counts.items()}


def _per_step(
    predicted: Result, recorded: Result
) -> Iterator[tuple[CountedLine, CountAndBytes, CountAndBytes]]:
    """Kernels, and copies within the device on the forward stream: means per step of a kind, no source line."""
    p, r = _means(predicted), _means(recorded)
    for place in sorted({*p, *r}):
        kind, stream, counter = place
        range_ = "" if counter == "kernel" else "model"
        line = CountedLine(kind, stream, range_, "", "", "", f"{counter} per step")
        yield line, CountAndBytes(p.get(place, 0.0), 0), CountAndBytes(r.get(place, 0.0), 0)


def _means(result: Result) -> dict[tuple[str, str, str], float]:
    return {
        (kind, stream, counter): round(tally.mean, 6)
        for kind, counts in result.per_step.items()
        if not kind.endswith(STEADY)
        for stream, counters in counts.streams.items()
        for counter, tally in counters.items()
        if counter == "kernel" or (counter == "d2d" and stream == "forward")
    }


def _steps(
    predicted: Result, announced: Mapping[str, Any], recorded: Result
) -> dict[str, tuple[int, int, int]]:
    p, r = (
        {k: c.steps for k, c in one.per_step.items() if not k.endswith(STEADY)}
        for one in (predicted, recorded)
    )
    a = announced["steps"]
    return {kind: (p.get(kind, 0), a.get(kind, 0), r.get(kind, 0)) for kind in sorted({*p, *a, *r})}


def _trouble(predicted: Result, recorded: Result) -> Iterator[str]:
    """What makes two runs no pair."""
    for name, result in (("predicted", predicted), ("recorded", recorded)):
        if result.run.cancelled:
            yield f"the {name} run was interrupted"
        if not result.per_step:
            passes = result.environment.get("passes")
            why = passes.get("abstained") if isinstance(passes, dict) else None
            yield f"the {name} run counted nothing: {why or 'it had no steps'}"


def main(arguments: Sequence[str]) -> int:
    """``PREDICTED.json ANNOUNCED.json RECORDED.json OUTPUT.json``: differences are written, and are no failure."""
    predicted, announced, recorded, output = map(Path, arguments)
    counts = json.loads(announced.read_text(encoding="utf-8"))
    found = document(verify(read(predicted), counts, read(recorded)))
    write_whole(output, json.dumps(found, indent=1) + "\n")
    return 0


def document(found: Verification) -> dict[str, Any]:
    """Plain dicts and lists."""
    return {
        "agrees": found.agrees,
        "compared": len(found.rows),
        "steps": {kind: list(counts) for kind, counts in found.steps.items()},
        "trouble": list(found.trouble),
        "explained": [_plain(row) for row in found.explained],
        "unexplained": [_plain(row) for row in found.unexplained],
        "rows": [_plain(row) for row in found.rows],
    }


def _plain(row: VerifiedRow) -> dict[str, Any]:
    tallies: Sequence[tuple[str, CountAndBytes | None]] = (
        ("predicted", row.predicted), ("announced", row.announced), ("recorded", row.recorded),
    )  # fmt: skip
    told = {
        name: None if tally is None else {"count": tally.times, "bytes": tally.bytes}
        for name, tally in tallies
    }
    return {**row.line._asdict(), **told, "agrees": row.agrees, "why": row.why}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
