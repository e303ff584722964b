"""The tables of one run, a capture and its ranks, but for those by source line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Final, get_args

from rich.table import Table
from rich.text import Text

from ..profiles.record.conclusion import idle_parts, metric_value, number_of
from ..profiles.record.definitions import DEFINITIONS, IDLE_NAMES, IDLE_PARTS, ReportTable, shown_in
from ..profiles.record.result import PROGRAM
from ..scenarios.schema import Stream
from .page import Document, Lines, framed, ordered, ordered_kinds
from .source_lines import LINES, copies, hazards, host_waits, worth_tables
from .text import MISSING, number, percent, whole

if TYPE_CHECKING:
    from ..profiles.measure.budget import Breach

_COUNTERS: Final = shown_in("counts", DEFINITIONS)
_STREAMS = get_args(Stream)
_OF_DEVICES = ("step_ms", "forward_ms", "idle_ms")  # several ranks each have their own, not in the latencies
_DRAFTS = ("accept_length", "position_acceptance.")
_ACRONYMS = ("ttft", "tpot", "itl", "e2e")
_GAP: Final = 3  # between two columns of ranks
FIRST_RANK: Final = "of each kind, the first rank that had any"
CRITICAL_PATH: Final = "critical path"
_OF_HOST_LATE: Final = {"exposed_stall": 1, "exposed_host": 1, "unnamed_host": 2, "launch_latency": 1}


def tables(result: Document, *, width: int, lines: int = LINES) -> tuple[Table | Lines, ...]:
    """The tables of a run, for a page of ``width`` columns. A run without meaningful times has no tables of times.
    ``lines``: the source lines that are shown of those that cost least."""
    if is_capture(result):
        return _capture_tables(result)
    ranks = by_rank(result, width=width) if result.get("ranks") else ()
    last = (*ranks, *hazards(result, "undeclared hazards"))
    if has_no_times(result):
        drafts = (summary(result),) if _with_values(result) else ()
        return *drafts, workload(result), counts(result), *last
    return (
        summary(result),
        workload(result),
        latency(result),
        *((drawn_ranges(result),) if "ranges" in result else ()),
        *(worth_tables(result, lines=lines) if "worth" in result else ()),
        counts(result),
        copies(result),
        host_waits(result, lines=lines),
        gpu_waits(result),
        *((critical_path(result),) if "critical_path" in result else ()),
        *last,
    )


def _capture_tables(result: Document) -> tuple[Table | Lines, ...]:
    """A capture has no tables of requests, tables of the device only where it recorded one, and tables of steps only
    where it has steps."""
    found = tuple(hazards(result, "hazards"))  # a program declares none
    if PROGRAM in result["per_step"]:
        return counts(result), copies(result), host_waits(result), *found
    first = summary(result), latency(result), ranges(result)
    if "abstained" in result["idle"] and not result["copies"]:
        return *first, steps_without_device(result)
    lines = copies(result), host_waits(result)
    return *first, counts(result), *lines, gpu_waits(result), *found


def is_capture(result: Document) -> bool:
    return "capture" in result["labels"]


def has_no_times(result: Document) -> bool:
    """Whether all times abstain for one and the same reason. The acceptance of drafts is not a time."""
    why = result["idle"].get("abstained")
    metrics = result["metrics"].items()
    return why is not None and all(
        metric.get("abstained") == why for name, metric in metrics if not name.startswith(_DRAFTS)
    )


def is_partial(result: Document) -> bool:
    """Whether the run ended before its requests had."""
    return bool(result["run"]["cancelled"] or result["run"].get("failure"))


def _with_values(result: Document) -> dict[str, Document]:
    return {name: metric for name, metric in result["metrics"].items() if "abstained" not in metric}


def summary(result: Document) -> Table:
    metrics = _with_values(result) if has_no_times(result) else result["metrics"]
    rows = [_plain(name, metrics[name]) for name in shown_in("summary", metrics)]
    remarks = any(remark for *_, remark in rows)
    table = framed("summary", "metric", "unit", ">value", *([""] if remarks else []))
    for row in rows:
        table.add_row(*(row if remarks else row[:-1]))
    return table


def _plain(name: str, metric: Document) -> tuple[str, str, str, str]:
    label = name.removesuffix("_pct").removesuffix("_ms").replace("_", " ").replace(".", " ")
    if "abstained" in metric:
        return label, "", MISSING, metric["abstained"]
    values = metric["values"]
    repeats = f"median of {len(values)}" if len(values) > 1 else ""
    if metric["unit"] == "ratio":
        return label, "%", percent(median(values)), repeats
    return label, metric["unit"], number(whole(median(values))), repeats


def workload(result: Document) -> Table:
    """Lengths as the scenario requests them, and as they were drawn or found in the trace. For a run that was cut
    short the latter are those of the plan."""
    lengths, partial = result["workload"], is_partial(result)
    plan = f"the plan of all {number(lengths['requests'])}; {number(len(result['requests']))} came"
    table = framed("workload, tokens", "", ">mean", ">p50", ">p95", caption=plan if partial else "")
    for label in ("prompt", "output"):
        for which in ("requested", "achieved"):
            summary = lengths[f"{label}_tokens"][which]
            if summary is not None:
                figures = (number(whole(round(summary[name], 1))) for name in ("mean", "p50", "p95"))
                planned = partial and which == "achieved"
                table.add_row(f"{label} {'planned' if planned else which}", *figures)
    return table


def latency(result: Document) -> Table:
    table = framed("latency, ms", "", ">n", ">mean", ">p50", ">p90", ">p95", ">p99", ">max")
    apart = _OF_DEVICES if result.get("ranks") else ()
    for name in shown_in("latency", result["metrics"]):
        if name not in apart:
            base, *variant = name.split(".")
            label = base.removesuffix("_ms").replace("_", " ")
            words = [label.upper() if label in _ACRONYMS else label, *variant]
            table.add_row(" ".join(words), *_times(result["metrics"][name]))
    return table


def _times(metric: Document) -> list[str]:
    if "abstained" in metric:
        return ["0"] + [MISSING] * 6
    quantiles = [metric.get(name) for name in ("p50", "p90", "p95", "p99")]
    supported = [None if isinstance(value, dict) else value for value in quantiles]
    return [number(value) for value in (metric["n"], median(metric["values"]), *supported, metric["max"])]


def drawn_ranges(result: Document) -> Table:
    """The extremes of the headline figures under draws of the hardware's constants."""
    part = result["ranges"]
    table = framed(
        f"ranges under {number_of(part['draws'], 'draw')} of the hardware's constants",
        *("metric", "unit", ">value", ">low", ">high", "follows"),
        caption="means over requests or steps; the constant that each follows most, with their rank correlation",
    )
    for name, extent in part["metrics"].items():
        figures = (number(value) for value in (metric_value(result, name), extent["low"], extent["high"]))
        follows = f"{extent['follows']} {extent['correlation']:+.2f}" if extent["follows"] else MISSING
        table.add_row(name, result["metrics"][name]["unit"], *figures, follows)
    return table


def counts(result: Document) -> Table:
    caption = "median / max over the steps of a kind; one number where they agree"
    caption += _whose(result, "per_step")
    per_step = result["per_step"]
    streams = ordered(
        {stream for kind in per_step.values() for stream in kind if stream != "steps"}, _STREAMS
    )
    sends = any("send" in kind.get("link", {}) for kind in per_step.values())
    counters = (*_COUNTERS, "send") if sends else _COUNTERS
    headings = ("step kind", ">steps", "stream", *(f">{counter}" for counter in counters))
    table = framed("copies & syncs per step", *headings, caption=caption)
    for kind in ordered_kinds(per_step):
        for row, stream in enumerate(streams):
            first = (kind, number(per_step[kind]["steps"])) if row == 0 else ("", "")
            tallies = per_step[kind].get(stream, {})
            table.add_row(*first, stream, *(_tally(tallies.get(counter)) for counter in counters))
    return table


def _whose(result: Document, part: str) -> str:
    """Of which rank each kind of step in a part of the result is; those of other ranks are in the document."""
    if not (ranks := result.get("ranks")) or not result[part]:
        return ""
    kinds = defaultdict[str, list[str]](list)
    for kind in ordered_kinds(result[part]):
        kinds[next((rank["name"] for rank in ranks if kind in rank[part]), MISSING)].append(kind)
    whose = ", ".join(f"{name} ({', '.join(of_rank)})" for name, of_rank in kinds.items())
    return f"; {FIRST_RANK}: {whose}"


def _tally(tally: Document | None) -> str:
    if tally is None:
        return "0"
    median, most = number(whole(tally["median"])), number(tally["max"])
    return most if median == most else f"{median} / {most}"


def gpu_waits(result: Document) -> Table:
    """Forward idle and its parts, which add up to it, and the idle time inside forwards."""
    table = framed("where the GPU waited", "between forwards", ">µs/step", ">share, %")
    idle, total = result["idle"], metric_value(result, "forward_idle_us_per_step")
    if "abstained" in idle or total is None:
        table.add_row("forward idle", MISSING, MISSING)
        return table
    parts = idle_parts(result)
    for name, label in IDLE_NAMES.items():
        us = parts[name]
        if name != "unnamed_host" or us:
            share = percent(us / total if total else None)
            label = "  " * _OF_HOST_LATE.get(name, 0) + label
            table.add_row(label, number(round(us, 6)), share, end_section=name == "residue")
    table.add_section()
    table.add_row("inside forwards", number(metric_value(result, "forward_gap_us_per_step")), "")
    return table


def critical_path(result: Document) -> Table:
    """For each kind of step, the share of its time that each part bounds."""
    kinds = ordered_kinds(result["critical_path"])
    paths = [result["critical_path"][kind] for kind in kinds]
    headings = ("bounded by, %", *(f">{kind}" for kind in kinds))
    caption = "each column adds up to the step" + _whose(result, "critical_path")
    table = framed(CRITICAL_PATH, *headings, caption=caption)
    parts = {
        part: sum(path["parts_ns"].get(part, 0) for path in paths)
        for path in paths
        for part in path["parts_ns"]
    }
    for part in sorted(parts, key=lambda name: -parts[name]):
        # A step whose forward ends within that of another one has no time.
        shares = (path["parts_ns"].get(part, 0) / (path["total_ns"] or 1) for path in paths)
        table.add_row(part, *map(percent, shares))
    table.add_section()
    table.add_row("step, µs", *(number(path["total_ns"] / 1e3 / path["steps"]) for path in paths))
    return table


def ranges(result: Document) -> Table:
    """Host time by range, ms."""
    headings = ("range", ">n", ">mean", ">p50", ">p99", ">max")
    table = framed("host ranges, ms", *headings, caption="nested ranges count in each other")
    for name in shown_in("host ranges", result["metrics"]):
        metric = result["metrics"][name]
        if "values" in metric:
            shown = [metric.get(figure) for figure in ("p50", "p99")]
            figures = [value if isinstance(value, float | int) else None for value in shown]
            row = (metric["n"], median(metric["values"]), *figures, metric["max"])
            table.add_row(name.removeprefix("range_ms."), *map(number, row))
    return table


def steps_without_device(result: Document) -> Table:
    """The steps of a capture without a GPU."""
    headings = ("step kind", ">steps", "copies, syncs and kernels")
    table = framed("steps", *headings, caption="nothing of the device was recorded")
    for kind, found in result["per_step"].items():
        table.add_row(kind, number(found["steps"]), MISSING)
    return table


def by_rank(result: Document, *, width: int) -> list[Table]:
    """As many tables as the columns of all ranks need. Rows without a number for any rank are left out."""
    rows = [row for row in _rank_rows(result["ranks"]) if any(cell != MISSING for cell in row[2])]
    columns = [[rank["name"], *(cells[at] for *_, cells in rows)] for at, rank in enumerate(result["ranks"])]
    taken = sum(max(len(row[at]) for row in rows) + _GAP for at in (0, 1))
    return [_rank_table(rows, columns, shown) for shown in _shares(columns, width - taken)]


def _shares(columns: list[list[str]], room: int) -> Iterator[range]:
    """The ranks of each table, in order: as many as there is room for, and at least one."""
    first, used = 0, 0
    for at, column in enumerate(columns):
        needed = max(map(len, column)) + _GAP
        if at > first and used + needed - _GAP > room:
            yield range(first, at)
            first, used = at, 0
        used += needed
    yield range(first, len(columns))


def _rank_table(rows: list[tuple[str, str, list[str]]], columns: list[list[str]], shown: range) -> Table:
    part = f", {shown.start + 1} to {shown.stop} of {len(columns)}" if len(shown) < len(columns) else ""
    made = framed(f"by rank{part}", "", "unit", *(f">{columns[at][0]}" for at in shown))
    for label, unit, cells in rows:
        made.add_row(label, unit, *cells[shown.start : shown.stop])
    return made


def _rank_rows(ranks: list[Document]) -> Iterator[tuple[str, str, list[str]]]:
    yield "role", "", [rank["role"] for rank in ranks]
    for kind in ordered_kinds({kind for rank in ranks for kind in rank["per_step"]}):
        steps = [rank["per_step"].get(kind, {}).get("steps") for rank in ranks]
        yield f"{kind} steps", "", [number(count) if count else MISSING for count in steps]
    names = {name for rank in ranks for name in rank["metrics"]}
    staged = any(rank["role"] == "pipeline" for rank in ranks)  # all stages run the same requests
    groups: tuple[ReportTable, ...] = ("rank device",) if staged else ("rank requests", "rank device")
    for name in (name for group in groups for name in shown_in(group, names)):
        label = name.removesuffix("_us_per_step").removesuffix("_ms").replace("_pct", "").replace("_", " ")
        label = (
            label.replace(".outside", ": before other work").replace(".mb", ": before mb").replace(".", ": ")
        )
        units = {rank["metrics"][name].get("unit", "") for rank in ranks if name in rank["metrics"]}
        unit = next(iter(units - {""}), "")
        cells = [_rank_cell(rank["metrics"].get(name)) for rank in ranks]
        yield label, "%" if unit == "ratio" else unit.replace("us", "µs"), cells
    for part in (part for part in IDLE_PARTS if part != "residue"):
        idle = [rank["idle"].get(f"{part}_us") for rank in ranks]
        cells = [MISSING if us is None else number(round(us / 1e3, 6)) for us in idle]
        yield f"idle: {part.replace('_', ' ')}", "ms", cells


def _rank_cell(metric: Document | None) -> str:
    if metric is None or "abstained" in metric:
        return MISSING
    value = median(metric["values"])
    return percent(value) if metric["unit"] == "ratio" else number(whole(value))


def budget(breaches: Sequence[Breach]) -> Iterator[Text]:
    """For each broken budget: the limit, the count in the worst step, and the source lines that caused it."""
    yield Text("budget broken", style="bold red")
    for breach in breaches:
        yield Text(
            f"✗ {breach.kind} {breach.stream} {breach.counter}: {number(breach.seen)} in the worst step, "
            f"{number(breach.allowed)} allowed ({number_of(breach.steps_with, 'step')} had any)"
        )
        for offender in breach.offenders:
            site, where = offender.site, offender.range or "unknown line"
            where = f"{site.file}:{site.line}  {site.statement}" if site else where
            yield Text(f"    {number(offender.times)} × {where}")
