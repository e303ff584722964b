"""Every metric of a result: its name, unit, better direction and meaning, and the tables that show it; and the other
words of the pages.

A new metric is a row of ``metrics.md`` here and a computation in ``profiles.measure`` (see ``measure.metrics``). The
definitions are read by ``explain``, by the reports and by the computations. Imports nothing but records and kinds of
steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, get_args

from ...sched.observe import StepKind
from .timeline import OpKind

Direction = Literal["higher", "lower", "none"]
ReportTable = Literal[
    "summary",
    "latency",
    "counts",
    "step kinds",  # rows of counts
    "copies",
    "host waits",
    "gpu waits",
    "host ranges",  # of a capture
    "rank requests",  # rows of the table by rank, where each rank has requests of its own
    "rank device",
]


# The parts of forward idle, and what each is called in tables, pictures and sentences.
IDLE_NAMES: Final = {
    "host_late": "host late",
    "exposed_stall": "exposed stall",
    "exposed_host": "exposed host work",
    "unnamed_host": "outside any range",
    "launch_latency": "launch latency",
    "dependency": "dependency",
    "kernel_gap": "kernel gap",
    "no_work": "no work",
    "residue": "residue",
    "forward_idle": "forward idle",
}
IDLE_PARTS: Final = (
    "host_late",
    "dependency",
    "kernel_gap",
    "no_work",
    "residue",
)  # which add up to all of it


class Definition(NamedTuple):
    """``direction`` is the better one, ``source`` names what the number is computed from. ``tables`` show it.
    ``variants``: what a suffix of the name selects, as in ``forward_ms.decode``."""

    name: str
    unit: str
    direction: Direction
    about: str
    formula: str
    source: str
    tables: tuple[ReportTable, ...]
    variants: Literal["", "kind", "position", "name", "microbatch", "budget"] = ""


KINDS: tuple[str, ...] = get_args(StepKind)
_COUNTED = frozenset((*get_args(OpKind), "sync"))
_WITH_QUALITY, _QUALITIES = ("h2d", "d2h"), ("pinned", "pageable", "blocking")
PERCENTILES = ("p50", "p90", "p95", "p99")

# What may follow the dot behind the name of a metric with variants.
_VARIANTS: Final = {
    "": "(?!)",
    "kind": f"({'|'.join(KINDS)})",
    "budget": rf"({'|'.join(KINDS)})(\.steady)?",
    "position": r"(?!0(\.|$))\d+",
    "microbatch": r"(outside|mb\d+)",
    "name": rf"(?!({'|'.join(PERCENTILES)})(\.|$))[^.]+",
}

PAGE: Final = Path(__file__).with_name("metrics.md").read_text(encoding="utf-8")


def _rows() -> Iterator[Definition]:
    """The rows of the page's tables, whose columns are the fields of a definition."""
    for line in PAGE.splitlines():
        if line.startswith("| `"):
            name, *fields, tables, variants = line[2:-2].split(" | ")
            yield Definition._make(
                (name.strip("`"), *fields, tuple(filter(None, tables.split(", "))), variants)
            )


DEFINITIONS: Mapping[str, Definition] = MappingProxyType({entry.name: entry for entry in _rows()})


# What the pages call things that are no metrics.
TERMS: Final[Mapping[str, str]] = MappingProxyType(
    dict(re.findall(r"(?m)^\| \*\*(.+)\*\* \| (.+) \|$", PAGE))
)


def full_name(short: str) -> str:
    """The metric that a page or a command line shortens: ``throughput`` is ``output_throughput``, ``ttft.p99`` is
    ``ttft_ms.p99``, ``exposed host work`` is ``exposed_host_us_per_step``. Raises KeyError."""
    parts = {title: part for part, title in IDLE_NAMES.items()}
    head, dot, rest = parts.get(short, short).partition(".")
    head = head.lower().replace(" ", "_")
    suffixes = ("", "_throughput", "_ms", "_us_per_step", "_us")
    names = ("output_throughput",) if head == "throughput" else tuple(f"{head}{end}" for end in suffixes)
    whole = f"{next((name for name in names if name in DEFINITIONS), head)}{dot}{rest}"
    definition(whole)
    return whole


def definition(metric: str) -> Definition:
    """The definition of a metric or counter, or of that which a kind, position, name, microbatch, percentile or kind of
    host memory is a variant of (``forward_ms.decode.p99``, ``bubble_pct.mb0``, ``h2d_pinned``). A counter may have the
    kind of step and the stream that it is of (``decode.steady.schedule.h2d``), and a budget its kind of step.

    Raises KeyError if there is none.
    """
    if metric in DEFINITIONS:
        return DEFINITIONS[metric]
    name, *rest = metric.split(".")
    if name in KINDS:
        *steady, stream, counter = rest if len(rest) > 1 else ("", "", "")
        if steady not in ([], ["steady"]) or not stream or counter.partition("_")[0] not in _COUNTED:
            raise KeyError(metric)
        return definition(counter)
    counter, _, quality = name.partition("_")
    if counter in _WITH_QUALITY and quality in _QUALITIES and not rest:
        return DEFINITIONS[counter]
    entry = DEFINITIONS[name]
    percentile = rf"(\.({'|'.join(PERCENTILES)}))?" if entry.unit == "ms" else ""
    if not re.fullmatch(rf"(\.{_VARIANTS[entry.variants]})?{percentile}", metric.removeprefix(name)):
        raise KeyError(metric)
    return entry


def shown_in(table: ReportTable, metrics: Iterable[str]) -> list[str]:
    """Those of ``metrics`` that a table shows, in the order of the definitions, followed by their variants."""
    order = {name: place for place, name in enumerate(DEFINITIONS) if table in DEFINITIONS[name].tables}
    found = [
        (bool(dot), order[name], f"{name}{dot}{rest}")
        for name, dot, rest in (m.partition(".") for m in metrics)
        if name in order
    ]
    return [metric for _, _, metric in sorted(found)]
