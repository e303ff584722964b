"""A result for people: what it is, how fast, what was copied from which line, who waited for whom.

Works on the document as it stands in the file, so that fresh and stored results look alike. Computes
nothing but sums and shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..scenarios.schema import Stream
from . import hazards, ranks
from .capture_page import headline as capture_headline
from .capture_page import is_capture, ranges, untold
from .capture_page import labels as capture_labels
from .frames import Document, framed, ordered, ordered_kinds
from .numbers import MISSING, cut_right, number, percent, whole
from .source_lines import copies, host_waits

if TYPE_CHECKING:
    from ..profiles.measure.budget import Breach, Offender

_STREAMS = get_args(Stream)
_COUNTERS = ("h2d", "d2h", "d2d", "sync", "kernel")
_PLAIN = (
    "output_throughput",
    "input_throughput",
    "total_throughput",
    "request_throughput",
    "steady_output_throughput",
    "steady_request_throughput",
    "decode_batch_size",
    "decode_bandwidth",
    "decode_flops",
    "prefill_flops",
    "forward_occupancy",
    "gpu_busy",
    "bubble_pct",
    "cache_hit_ratio",
    "hisparse_hit_ratio",
    "hisparse_swap_in_bytes_per_step",
    "retractions",
    "peak_kv_tokens",
    "accept_length",
)
_DRAFTS = ("accept_length", "position_acceptance.")
_TRANSFER = ("prefill_ms", "transfer_ms", "decode_queue_ms")  # of workers of their own for prompts
_OF_DEVICES = ("step_ms", "forward_ms", "idle_ms")  # where there are several, each tells its own
_TIMES = (
    "ttft_ms",
    "queue_ms",
    *_TRANSFER,
    "tpot_ms",
    "itl_ms",
    "e2e_ms",
    *_OF_DEVICES,
)
_IN_WORDS = ("queue", "prefill", "transfer", "decode", "step", "forward", "idle")
_IDLE = ("host_late", "dependency", "kernel_gap", "no_work", "residue")


def render(result: Document, console: Console, *, breaches: Sequence[Breach] = ()) -> None:
    """Everything there is to see of one run."""
    console.print(headline(result))
    for table in every(result, width=console.width):
        console.print()
        console.print(table)
    if breaches:
        console.print()
        console.print(budget(breaches, width=console.width))


def every(result: Document, *, width: int) -> tuple[Table, ...]:
    """The tables of a run, for a page of ``width`` columns. A run whose times mean nothing has none of times."""
    if is_capture(result):
        return _of_capture(result, width=width)
    by_rank = ranks.tables(result, width=width) if result.get("ranks") else ()
    found = (hazards.table(result["hazards"]),) if result["hazards"].get("findings") else ()
    if _void(result):
        drafts = (summary(result),) if _told(result) else ()
        return *drafts, workload(result), counts(result), *by_rank, *found
    return (
        summary(result),
        workload(result),
        latency(result),
        counts(result),
        copies(result, width=width),
        host_waits(result, width=width),
        gpu_waits(result),
        *by_rank,
        *found,
    )


def _of_capture(result: Document, *, width: int) -> tuple[Table, ...]:
    """Requests are told by none of them, the device only where there was one."""
    if "abstained" in result["idle"] and not result["copies"]:
        return summary(result), latency(result), ranges(result), untold(result)
    device = (counts(result), copies(result, width=width), host_waits(result, width=width), gpu_waits(result))
    return summary(result), latency(result), ranges(result), *device


def _void(result: Document) -> bool:
    """Whether every time abstains, for one and the same reason; how many drafts were accepted is no time."""
    why = result["idle"].get("abstained")
    metrics = result["metrics"].items()
    return why is not None and all(
        metric.get("abstained") == why for name, metric in metrics if not name.startswith(_DRAFTS)
    )


def _partial(result: Document) -> bool:
    """Whether it ended before its requests had."""
    return bool(result["run"]["cancelled"] or result["run"].get("failure"))


def _told(result: Document) -> dict[str, Document]:
    """Metrics that have a value."""
    return {name: metric for name, metric in result["metrics"].items() if "abstained" not in metric}


def headline(result: Document) -> Text:
    if is_capture(result):
        return capture_headline(result, labels(result))
    scenario = result["scenario"]["expanded"]
    statuses = Counter(request["status"] for request in result["requests"])
    ended = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    digest = result["outputs"].get("digest")
    text = Text.assemble(
        (str(scenario.get("name", "run")), "bold"), f"  {scenario.get('about', '')}".rstrip()
    )
    text.append(f"\n{labels(result)}")
    asked = len(result["requests"])
    text.append(f"\n{asked} {'request' if asked == 1 else 'requests'}: {ended or 'none'}")
    text.append("".join(f"; {shortfall}" for shortfall in _shortfalls(result)))
    text.append(
        f"\ntokens {digest[:16]}" if digest else f"\ntokens {MISSING} {result['outputs']['abstained']}"
    )
    found = hazards.count(result["hazards"])
    text.append(f"\nhazards {found}" if found else "")
    return text


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
        parts += [relay(result["relay"]), f"host time {label['host']}"]
    parts += ["drafts accepted by lot"] if label.get("acceptance") == "simulated" else []
    parts += ["profiled: not for timing"] if label["profiled"] else []
    parts += [result["idle"]["abstained"]] if _void(result) else []
    parts += ["cancelled: partial"] if result["run"]["cancelled"] else []
    parts += ["broke off: partial"] if result["run"].get("failure") else []
    return " · ".join(parts)


def relay(part: Document) -> str:
    """The state, and the loop that it ran in."""
    loop = part.get("loop")
    return f"relay {part['state']}{f', {loop}' if loop else ''}"


def summary(result: Document) -> Table:
    table = framed("summary")
    table.add_column("metric")
    table.add_column("unit")
    table.add_column("value", justify="right")
    metrics = _told(result) if _void(result) else result["metrics"]
    positions = sorted(name for name in metrics if name.startswith("position_acceptance."))
    known = [(name, metrics.get(name)) for name in (*_PLAIN, *positions)]
    rows = [_plain(name, metric) for name, metric in known if metric is not None]
    remarks = any(remark for *_, remark in rows)
    if remarks:
        table.add_column("")
    for row in rows:
        table.add_row(*(row if remarks else row[:-1]))
    return table


def _plain(name: str, metric: Document) -> tuple[str, str, str, str]:
    label = name.removesuffix("_pct").replace("_", " ").replace(".", " ")
    if "abstained" in metric:
        return label, "", MISSING, metric["abstained"]
    values = metric["values"]
    middle = sorted(values)[len(values) // 2]
    repeats = f"median of {len(values)}" if len(values) > 1 else ""
    if metric["unit"] == "ratio":
        return label, "%", percent(middle), repeats
    return label, metric["unit"], number(whole(middle)), repeats


def workload(result: Document) -> Table:
    """Lengths as the scenario asks for them, and as they were drawn or found in the trace: the plan, where a run did
    not come to its end."""
    told, partial = result["workload"], _partial(result)
    came = f"the plan of all {number(told['requests'])}; {number(len(result['requests']))} came"
    table = framed("workload, tokens", caption=came if partial else "")
    table.add_column("")
    for heading in ("mean", "p50", "p95"):
        table.add_column(heading, justify="right")
    for label in ("prompt", "output"):
        for which in ("requested", "achieved"):
            summary = told[f"{label}_tokens"][which]
            if summary is not None:
                figures = (number(whole(round(summary[name], 1))) for name in ("mean", "p50", "p95"))
                planned = partial and which == "achieved"
                table.add_row(f"{label} {'planned' if planned else which}", *figures)
    return table


def _shortfalls(result: Document) -> list[str]:
    """What the scenario asked for and did not get."""
    told, asked = result["workload"], result["scenario"]["expanded"].get("workload", {}).get("requests")
    short = asked is not None and told["requests"] < asked
    words = [f"the trace has {number(told['requests'])} of {number(asked)}"] if short else []
    return words + ([f"{number(told['clipped'])} clipped to the context"] if told["clipped"] else [])


def latency(result: Document) -> Table:
    table = framed("latency, ms")
    table.add_column("")
    for heading in ("n", "mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(heading, justify="right")
    metrics = result["metrics"]
    kinds = sorted(name for name in metrics if name.startswith("forward_ms."))
    apart = _OF_DEVICES if result.get("ranks") else ()
    for name in (*_TIMES, *kinds):
        if name in metrics and name not in apart:
            label = name.replace("_ms", "").replace("_", " ").replace(".", " ")
            table.add_row(
                label if label.startswith(_IN_WORDS) else label.upper(),
                *_times(metrics[name]),
            )
    return table


def _times(metric: Document) -> list[str]:
    if "abstained" in metric:
        return ["0"] + [MISSING] * 6
    mean = sum(metric["values"]) / len(metric["values"])
    quantiles = [metric.get(name) for name in ("p50", "p90", "p95", "p99")]
    supported = [None if isinstance(value, dict) else value for value in quantiles]
    return [number(value) for value in (metric["n"], mean, *supported, metric["max"])]


def counts(result: Document) -> Table:
    table = framed(
        "copies & syncs per step",
        caption=f"median / max over the steps of a kind; one number where they agree{_whose(result)}",
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


def _whose(result: Document) -> str:
    """Of several ranks one is shown: the others are in the file."""
    return "; of each kind, the first rank that had any" if result.get("ranks") else ""


def _tally(tally: Document | None) -> str:
    if tally is None:
        return "0"
    median, most = number(whole(tally["median"])), number(tally["max"])
    return most if median == most else f"{median} / {most}"


def gpu_waits(result: Document) -> Table:
    """Forward idle, split without remainder, and apart from it what was idle inside forwards."""
    table = framed("where the GPU waited")
    table.add_column("between forwards")
    table.add_column("µs/step", justify="right")
    table.add_column("share, %", justify="right")
    idle, total = result["idle"], _value(result, "forward_idle_us_per_step")
    if "abstained" in idle or total is None:
        table.add_row("forward idle", MISSING, MISSING)
        return table
    for label, us in _idle_rows(result, total):
        share = us / total if total else None
        table.add_row(label, number(round(us, 6)), percent(share), end_section=label == "residue")
    table.add_section()
    table.add_row("inside forwards", number(_value(result, "forward_gap_us_per_step")), "")
    return table


def _idle_rows(result: Document, total: float) -> list[tuple[str, float]]:
    """us per step; ``total`` is all of forward idle."""
    idle = result["idle"]
    whole = sum(idle[f"{name}_us"] for name in _IDLE)
    part = {name.removesuffix("_us"): total * us / whole if whole else 0.0 for name, us in idle.items()}
    stall, work = (_value(result, f"exposed_{what}_us_per_step") or 0.0 for what in ("stall", "host"))
    unnamed = [("    outside any range", part["unnamed_host"])] if part["unnamed_host"] else []
    return [
        ("host late", part["host_late"]),
        ("  exposed stall", stall),
        ("  exposed host work", work),
        *unnamed,
        ("  launch latency", part["launch_latency"]),
        ("waiting on an event or stream", part["dependency"]),
        ("kernel gap", part["kernel_gap"]),
        ("no work", part["no_work"]),
        ("residue", part["residue"]),
        ("forward idle", total),
    ]


def _value(result: Document, metric: str) -> float | None:
    values = result["metrics"].get(metric, {}).get("values")
    return sum(values) / len(values) if values else None


def budget(breaches: Sequence[Breach], *, width: int) -> Text:
    """What was allowed, what was seen, and which lines did it."""
    text = Text.assemble(("budget broken", "bold red"))
    for breach in breaches:
        text.append(
            f"\n✗ {breach.kind} {breach.stream} {breach.counter}: {number(breach.seen)} in the worst step, "
            f"{number(breach.allowed)} allowed ({number(breach.steps_with)} steps had any)"
        )
        for offender in breach.offenders:
            text.append("\n" + cut_right(_offender(offender), width))
    return text


def _offender(offender: Offender) -> str:
    site = offender.site
    where = f"{site.file}:{site.line}  {site.statement}" if site else offender.range or "unknown line"
    return f"    {number(offender.times)} × {where}"
