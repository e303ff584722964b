"""The page of one run: its headline and its tables.

Works on the document as it is stored, so that fresh and stored results look alike. Computes only sums and shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, get_args

from rich.table import Table
from rich.text import Text

from ..profiles.record.conclusion import conclusion, engine_name, idle_parts, listed, mean_value
from ..profiles.record.definitions import DEFINITIONS, IDLE_NAMES, shown_in
from ..profiles.record.result import PROGRAM
from ..scenarios.schema import Stream
from . import rank_tables, worth_page
from .capture_page import capture_notes, is_capture, ranges, steps_without_device
from .capture_page import labels as capture_labels
from .page import Document, Lines, Page, framed, ordered, ordered_kinds
from .pictures import run_charts
from .source_lines import LINES, copies, hazard_count, hazard_table, host_waits
from .text import MISSING, cut_right, number, percent, whole

if TYPE_CHECKING:
    from ..profiles.measure.budget import Breach, Offender

_COUNTERS: Final = shown_in("counts", DEFINITIONS)
_STREAMS = get_args(Stream)
_DRAFTS = ("accept_length", "position_acceptance.")
_OF_DEVICES = (
    "step_ms",
    "forward_ms",
    "idle_ms",
)  # not in the latencies of several ranks: each rank has its own
_NAMED = 6  # packages and queries that are shown
_ACRONYMS = ("ttft", "tpot", "itl", "e2e")
FEW: Final = 4  # source lines in a table of the first screenful
_PATH: Final = "critical path"
_OF_HOST_LATE: Final = {"exposed_stall": 1, "exposed_host": 1, "unnamed_host": 2, "launch_latency": 1}
_REST: Final = ("summary", "workload, tokens", "copies by source line", "where the GPU waited", _PATH)


def page(result: Document, width: int, *, breaches: Sequence[Breach] = (), lines: int = LINES) -> Page:
    """``lines``: the source lines that are shown of those that cost least, of a run that came to its end."""
    name = str(result["scenario"]["expanded"].get("name", ""))
    broken = [Lines([Text(), *budget(breaches, width=width)])] if breaches else []
    unasked = [Text(f"budget of {kind} not asked: {reason}") for kind, reason in not_asked(result).items()]
    whole = is_capture(result) or _is_partial(result)
    return Page(
        f"{name} · {labels(result)}",
        [
            Lines(headline(result)),
            *tables(result, width=width, lines=LINES if whole else lines),
            *broken,
            *([Lines([Text(), *unasked])] if unasked else []),
            *run_charts(result),
        ],
        conclusion(result),
        footer=(f"`{result['run']['command']}`",),
        rest=() if whole else _REST,
    )


def worth_page_of(result: Document, width: int, *, few: bool = False) -> Page:
    """Only what lines and host phases are worth; ``few`` hidden ones, beside those whose room was searched for."""
    asked = sum(1 for row in result["worth"]["rows"] if row["room_us"])
    lines = max(FEW, asked) if few else LINES
    name = str(result["scenario"]["expanded"].get("name", ""))
    return Page(
        f"worth of {name} · {labels(result)}",
        [Lines(headline(result)), *worth_page.tables(result, width=width, lines=lines), *run_charts(result)],
        conclusion(result),
        footer=(f"`{result['run']['command']}`",),
    )


def tables(result: Document, *, width: int, lines: int = LINES) -> tuple[Table, ...]:
    """The tables of a run, for a page of ``width`` columns. A run without meaningful times has no tables of times.
    ``lines``: the source lines that are shown of those that cost least."""
    if is_capture(result):
        return _capture_tables(result, width=width)
    by_rank = rank_tables.tables(result, width=width) if result.get("ranks") else ()
    found = (hazard_table(result["hazards"]),) if result["hazards"].get("findings") else ()
    if _has_no_times(result):
        drafts = (summary(result),) if _with_values(result) else ()
        return *drafts, workload(result), counts(result), *by_rank, *found
    return (
        summary(result),
        workload(result),
        latency(result),
        *((drawn_ranges(result),) if "ranges" in result else ()),
        *(worth_page.tables(result, width=width, lines=lines) if "worth" in result else ()),
        counts(result),
        copies(result, width=width),
        host_waits(result, width=width, lines=lines),
        gpu_waits(result),
        *((critical_path(result),) if "critical_path" in result else ()),
        *by_rank,
        *found,
    )


def _capture_tables(result: Document, *, width: int) -> tuple[Table, ...]:
    """A capture has no tables of requests, tables of the device only where it recorded one, and tables of steps only
    where it has steps."""
    found = (hazard_table(result["hazards"]),) if result["hazards"].get("findings") else ()
    if PROGRAM in result["per_step"]:
        return counts(result), copies(result, width=width), host_waits(result, width=width), *found
    if "abstained" in result["idle"] and not result["copies"]:
        return summary(result), latency(result), ranges(result), steps_without_device(result)
    device = (counts(result), copies(result, width=width), host_waits(result, width=width), gpu_waits(result))
    return summary(result), latency(result), ranges(result), *device, *found


def _has_no_times(result: Document) -> bool:
    """Whether all times abstain for one and the same reason. The acceptance of drafts is not a time."""
    why = result["idle"].get("abstained")
    metrics = result["metrics"].items()
    return why is not None and all(
        metric.get("abstained") == why for name, metric in metrics if not name.startswith(_DRAFTS)
    )


def _is_partial(result: Document) -> bool:
    """Whether the run ended before its requests had."""
    return bool(result["run"]["cancelled"] or result["run"].get("failure"))


def _with_values(result: Document) -> dict[str, Document]:
    return {name: metric for name, metric in result["metrics"].items() if "abstained" not in metric}


def headline(result: Document) -> list[Text]:
    """The name of the run, what kind of numbers these are, and what became of the requests."""
    scenario = result["scenario"]["expanded"]
    name, about = str(scenario.get("name", "run")), scenario.get("about", "")
    lines = [Text.assemble((name, "bold"), f"  {about}".rstrip()), Text(labels(result))]
    found = hazard_count(result["hazards"])
    hazard_lines = [Text(f"hazards {found}")] if found else []
    if is_capture(result):
        return [*lines, *capture_notes(result), *hazard_lines]
    count = len(result["requests"])
    statuses = Counter(request["status"] for request in result["requests"])
    ended = ", ".join(f"{n} {status}" for status, n in sorted(statuses.items()))
    shortfalls = "".join(f"; {shortfall}" for shortfall in _shortfalls(result))
    lines.append(Text(f"{count} {'request' if count == 1 else 'requests'}: {ended or 'none'}{shortfalls}"))
    outputs = result["outputs"]
    tokens = outputs["digest"][:16] if outputs.get("digest") else f"{MISSING} {outputs['abstained']}"
    lines.append(Text(f"tokens {tokens}"))
    return [*lines, *hazard_lines, *edge(result["labels"])]


def labels(result: Document) -> str:
    """What kind of numbers these are."""
    label = result["labels"]
    parts = [
        "emulated" if label["emulated"] else "measured",
        result["hardware"]["name"],
    ]
    if is_capture(result):
        parts += capture_labels(result)
    else:
        parts += [scheduler(label, result["relay"]), f"host time {label['host']}"]
    parts += ["acceptance of drafts simulated"] if label.get("acceptance") == "simulated" else []
    parts += ["profiled: not for timing"] if label["profiled"] else []
    parts += [result["idle"]["abstained"]] if _has_no_times(result) else []
    parts += ["cancelled: partial"] if result["run"]["cancelled"] else []
    parts += ["broke off: partial"] if result["run"].get("failure") else []
    return " · ".join(parts)


def scheduler(label: Document, relay: Document) -> str:
    """The engine of another project, or the relay's state; and the loop."""
    loop = relay.get("loop")
    name = engine_name(label["engine"]) if label.get("engine") else f"relay {relay['state']}"
    return f"{name}{f', {loop}' if loop else ''}"


def edge(label: Document) -> list[Text]:
    """What of the engine's surroundings was not there."""
    part = (label.get("engine") or {}).get("edge", {})
    said = {
        "absent, and empty modules here": "hollow",
        "answered by a constant": "answered_by_default",
        "absent, called, and without effect": "without_effect",
        "Triton kernels in their first configuration": "autotuned",
    }
    named = [
        Text(f"{what}: {listed(part[key], _NAMED)}", style="dim")
        for what, key in said.items()
        if part.get(key)
    ]
    left_out = part.get("uncounted", {}).items()
    return [*named, *(Text(f"counts of {kind} steps abstain: {reason}") for kind, reason in left_out)]


def summary(result: Document) -> Table:
    metrics = _with_values(result) if _has_no_times(result) else result["metrics"]
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
    middle = sorted(values)[len(values) // 2]
    repeats = f"median of {len(values)}" if len(values) > 1 else ""
    if metric["unit"] == "ratio":
        return label, "%", percent(middle), repeats
    return label, metric["unit"], number(whole(middle)), repeats


def workload(result: Document) -> Table:
    """Lengths as the scenario requests them, and as they were drawn or found in the trace. For a run that was cut
    short the latter are those of the plan."""
    lengths, partial = result["workload"], _is_partial(result)
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


def _shortfalls(result: Document) -> list[str]:
    """What the scenario requested and the workload did not have."""
    workload, requested = (
        result["workload"],
        result["scenario"]["expanded"].get("workload", {}).get("requests"),
    )
    short = requested is not None and workload["requests"] < requested
    words = [f"the trace has {number(workload['requests'])} of {number(requested)}"] if short else []
    if left_out := workload.get("left_out"):
        words.append(f"{number(left_out)} records without prompt or output left out")
    return words + ([f"{number(workload['clipped'])} clipped to the context"] if workload["clipped"] else [])


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
    mean = sum(metric["values"]) / len(metric["values"])
    quantiles = [metric.get(name) for name in ("p50", "p90", "p95", "p99")]
    supported = [None if isinstance(value, dict) else value for value in quantiles]
    return [number(value) for value in (metric["n"], mean, *supported, metric["max"])]


def drawn_ranges(result: Document) -> Table:
    """The extremes of the headline figures under draws of the hardware's constants."""
    part = result["ranges"]
    table = framed(
        f"ranges under {number(part['draws'])} draws of the hardware's constants",
        *("metric", "unit", ">value", ">low", ">high", "follows"),
        caption="means over requests or steps; the constant that each follows most, with their rank correlation",
    )
    for name, extent in part["metrics"].items():
        figures = (number(value) for value in (mean_value(result, name), extent["low"], extent["high"]))
        follows = f"{extent['follows']} {extent['correlation']:+.2f}" if extent["follows"] else MISSING
        table.add_row(name, result["metrics"][name]["unit"], *figures, follows)
    return table


def counts(result: Document) -> Table:
    table = framed(
        "copies & syncs per step",
        caption=f"median / max over the steps of a kind; one number where they agree{_which_rank(result)}",
    )
    per_step = result["per_step"]
    streams = ordered(
        {stream for kind in per_step.values() for stream in kind if stream != "steps"}, _STREAMS
    )
    table.add_column("step kind", min_width=max(map(len, per_step), default=0))
    table.add_column("steps", justify="right")
    table.add_column("stream", min_width=max(map(len, streams), default=0))
    sends = any("send" in kind.get("link", {}) for kind in per_step.values())
    counters = (*_COUNTERS, "send") if sends else _COUNTERS
    table.padding = (0, 1, 0, 0) if sends else table.padding  # one more column on 80
    for counter in counters:
        table.add_column(counter, justify="right")
    for kind in ordered_kinds(per_step):
        for row, stream in enumerate(streams):
            first = (kind, number(per_step[kind]["steps"])) if row == 0 else ("", "")
            tallies = per_step[kind].get(stream, {})
            table.add_row(*first, stream, *(_tally(tallies.get(counter)) for counter in counters))
    return table


def _which_rank(result: Document) -> str:
    """The counts shown are of one rank; those of the others are in the document."""
    return "; of each kind, the first rank that had any" if result.get("ranks") else ""


def _tally(tally: Document | None) -> str:
    if tally is None:
        return "0"
    median, most = number(whole(tally["median"])), number(tally["max"])
    return most if median == most else f"{median} / {most}"


def gpu_waits(result: Document) -> Table:
    """Forward idle and its parts, which add up to it, and the idle time inside forwards."""
    table = framed("where the GPU waited", "between forwards", ">µs/step", ">share, %")
    idle, total = result["idle"], mean_value(result, "forward_idle_us_per_step")
    if "abstained" in idle or total is None:
        table.add_row("forward idle", MISSING, MISSING)
        return table
    for label, us in _idle_rows(result):
        share = us / total if total else None
        table.add_row(label, number(round(us, 6)), percent(share), end_section=label == "residue")
    table.add_section()
    table.add_row("inside forwards", number(mean_value(result, "forward_gap_us_per_step")), "")
    return table


def critical_path(result: Document) -> Table:
    """For each kind of step, the share of its time that each part bounds."""
    kinds = ordered_kinds(result["critical_path"])
    paths = [result["critical_path"][kind] for kind in kinds]
    table = framed(
        _PATH, "bounded by, %", *(f">{kind}" for kind in kinds), caption="each column adds up to the step"
    )
    parts = {
        part: sum(path["parts_ns"].get(part, 0) for path in paths)
        for path in paths
        for part in path["parts_ns"]
    }
    for part in sorted(parts, key=lambda name: -parts[name]):
        table.add_row(part, *(percent(path["parts_ns"].get(part, 0) / path["total_ns"]) for path in paths))
    table.add_section()
    table.add_row("step, µs", *(number(path["total_ns"] / 1e3 / path["steps"]) for path in paths))
    return table


def _idle_rows(result: Document) -> list[tuple[str, float]]:
    """Us per step of each part."""
    part = idle_parts(result)
    shown = [name for name in IDLE_NAMES if name != "unnamed_host" or part[name]]
    return [("  " * _OF_HOST_LATE.get(name, 0) + IDLE_NAMES[name], part[name]) for name in shown]


def not_asked(result: Document) -> Mapping[str, str]:
    """By kind of step, why its budget does not apply to the run."""
    found: Mapping[str, str] = result.get("not_asked", {})
    return found


def budget(breaches: Sequence[Breach], *, width: int) -> Iterator[Text]:
    """For each broken budget: the limit, the count in the worst step, and the source lines that caused it."""
    yield Text("budget broken", style="bold red")
    for breach in breaches:
        yield Text(
            f"✗ {breach.kind} {breach.stream} {breach.counter}: {number(breach.seen)} in the worst step, "
            f"{number(breach.allowed)} allowed ({number(breach.steps_with)} steps had any)"
        )
        for offender in breach.offenders:
            yield Text(cut_right(_offender(offender), width))


def _offender(offender: Offender) -> str:
    site = offender.site
    where = f"{site.file}:{site.line}  {site.statement}" if site else offender.range or "unknown line"
    return f"    {number(offender.times)} × {where}"
