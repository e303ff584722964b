"""The page of one run or capture: its headline and its tables; and its figures as CSV.

Works on the document as it is stored, so that fresh and stored results look alike. Computes only sums and shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from ..profiles.record.conclusion import conclusion, engine_name, listed, number_of, numbers, timed_passes
from . import result_tables
from .page import Document, Lines, Page, to_csv
from .pictures import place, run_charts
from .source_lines import LINES, hazard_count, worth_tables
from .text import MISSING, number

if TYPE_CHECKING:
    from ..profiles.measure.budget import Breach

_NAMED = 6  # packages and queries that are shown
FEW: Final = 4  # source lines in a table of the first screenful
_REST: Final = (
    "summary",
    "workload, tokens",
    "copies by source line",
    "where the GPU waited",
    result_tables.CRITICAL_PATH,
)
_WAITED: Final = "where the host waited"
_GRAPHS = {
    "none": "none",
    "node": "kernel by kernel",
    "graph": "whole",
    "unknown": "counted like other kernels",
}
_CSV = (
    *("scenario", "relay", "label", "host", "digest"),
    *("rank", "role"),  # empty in rows of the whole run
    *("metric", "unit", "value", "p50", "p90", "p95", "p99"),
    *("median", "mean", "max", "steps_with", "abstained"),
    *("low", "high"),  # under draws of the hardware's constants
)


def page(result: Document, width: int, *, breaches: Sequence[Breach] = (), lines: int = LINES) -> Page:
    """``lines``: the source lines that are shown of those that cost least, unless the run broke off. The first
    screenful of an interrupted run has one table."""
    name = str(result["scenario"]["expanded"].get("name", ""))
    broken = [Lines([Text(), *result_tables.budget(breaches)])] if breaches else []
    which = listed([f"{one.kind} {one.stream} {one.counter}" for one in breaches], 3)
    not_asked = result.get("not_asked", {}).items()
    unasked = [Text(f"budget of {kind} not asked: {reason}") for kind, reason in not_asked]
    whole = result_tables.is_capture(result) or bool(result["run"].get("failure"))
    tables = result_tables.tables(result, width=width, lines=LINES if whole else lines)
    rest: Sequence[str] = () if whole else _REST
    if result["run"]["cancelled"] and not whole:
        titles = [str(table.title) for table in tables if isinstance(table, Table)]
        rest = tuple(title for title in titles if title != _WAITED)
    return Page(
        name if result_tables.is_capture(result) else f"run {name}",
        [
            Lines(headline(result)),
            *tables,
            *broken,
            *([Lines([Text(), *unasked])] if unasked else []),
            *run_charts(result),
        ],
        "; ".join(filter(None, (which and f"budget broken: {which}", conclusion(result)))),
        footer=(f"`{result['run']['command']}`",),
        rest=rest,
    )


def worth_page_of(result: Document, *, few: bool = False) -> Page:
    """Only what lines and host phases are worth; ``few`` hidden ones, beside those whose room was searched for."""
    asked = sum(1 for row in result["worth"]["rows"] if row["room_us"])
    lines = max(FEW, asked) if few else LINES
    name = str(result["scenario"]["expanded"].get("name", ""))
    return Page(
        f"worth {name}",
        [Lines(headline(result)), *worth_tables(result, lines=lines), *run_charts(result)],
        conclusion(result),
        footer=(f"`{result['run']['command']}`",),
    )


def headline(result: Document) -> list[Text]:
    """The name of the run, what kind of numbers these are, and what became of the requests."""
    scenario = result["scenario"]["expanded"]
    name = str(scenario.get("name", "run"))
    # A scenario's description is of its own relay.
    about = "" if result["labels"].get("engine") else scenario.get("about", "")
    lines = [Text.assemble((name, "bold"), f"  {about}".rstrip()), Text(labels(result))]
    found = hazard_count(result["hazards"])
    hazard_lines = [Text(f"hazards {found}")] if found else []
    if result_tables.is_capture(result):  # the conclusion has the number of its hazards
        return [*lines, *_capture_notes(result), *(hazard_lines if found == "none" else ())]
    statuses = Counter(request["status"] for request in result["requests"])
    ended = ", ".join(f"{n} {status}" for status, n in sorted(statuses.items()))
    shortfalls = "".join(f"; {shortfall}" for shortfall in _shortfalls(result))
    lines.append(Text(f"{number_of(len(result['requests']), 'request')}: {ended or 'none'}{shortfalls}"))
    outputs = result["outputs"]
    tokens = outputs["digest"][:16] if outputs.get("digest") else f"{MISSING} {outputs['abstained']}"
    lines.append(Text(f"tokens {tokens}"))
    return [*lines, *hazard_lines, *edge(result["labels"])]


def labels(result: Document) -> str:
    """What kind of numbers these are."""
    label = result["labels"]
    parts = [numbers(label, result["hardware"]["name"])]
    if result_tables.is_capture(result):
        parts += _capture_labels(result)
    else:
        parts += [scheduler(label, result["relay"]), *host_time(label, label.get("engine"))]
    timed = timed_passes(result)
    parts += [f"median of {timed} passes"] if timed > 1 else []
    parts += ["not for timing"] if label["profiled"] else []
    parts += [result["idle"]["abstained"]] if result_tables.has_no_times(result) else []
    parts += ["cancelled: partial"] if result["run"]["cancelled"] else []
    parts += ["further runs interrupted"] if result["run"].get("further_cancelled") else []
    parts += ["broke off: partial"] if result["run"].get("failure") else []
    return " · ".join(parts)


def scheduler(label: Document, relay: Document) -> str:
    """The engine of another project, or the relay's state; and the loop."""
    loop = relay.get("loop")
    name = engine_name(label["engine"]) if label.get("engine") else f"relay {relay['state']}"
    return f"{name}{f', {loop}' if loop else ''}"


def host_time(label: Document, *engines: Document | None) -> list[str]:
    """A modelled one is not that of an engine's own Python; of a measured one, ``numbers`` says so."""
    other = ", not the engine's own (device.host=measured)" * any(engines)
    return [f"host time modelled{other}"] if label["host"] == "modelled" else []


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


def _shortfalls(result: Document) -> list[str]:
    """What the scenario requested and the workload did not have."""
    workload = result["workload"]
    requested = result["scenario"]["expanded"].get("workload", {}).get("requests")
    short = requested is not None and workload["requests"] < requested
    words = [f"the trace has {number(workload['requests'])} of {number(requested)}"] if short else []
    if left_out := workload.get("left_out"):
        words.append(f"{number_of(left_out, 'record')} without prompt or output left out")
    return words + ([f"{number(workload['clipped'])} clipped to the context"] if workload["clipped"] else [])


def _capture_notes(result: Document) -> list[Text]:
    """What the capture lacks: these lines stand before its numbers."""
    capture = result["environment"]["capture"]
    lines = [f"{number_of(capture['steps'], 'step')}, ranges as in the map {capture['map']}"] * bool(
        capture["steps"]
    )
    lines += [f"! {note}" for note in capture["notes"]]
    if warnings := capture.get("warnings_of_the_tool"):
        lines.append(f"! the tool warned {number_of(warnings, 'time')} while it recorded")
    if capture.get("overhead_of_the_tool_us"):
        lines.append(f"! of the time, the tool itself took {number(capture['overhead_of_the_tool_us'])} µs")
    return [Text(line) for line in lines]


def _capture_labels(result: Document) -> list[str]:
    """The tool and how it recorded CUDA graphs. A capture has neither a relay nor a kind of host time."""
    environment = result["environment"]
    versions = environment["capture"]["versions"]
    words = [environment["source_of_counts"], versions.get("EXPORT_PRODUCT_VERSION", "")]
    schema = versions.get("EXPORT_SCHEMA_VERSION")
    words += [f"(schema {schema})"] if schema else []
    graphs = _GRAPHS.get(environment["cuda_graph_trace"], MISSING)
    return [" ".join(word for word in words if word), f"CUDA graphs: {graphs}"]


def csv_of(documents: Sequence[Document], *, only: str = "") -> str:
    """One row per metric, and per count of a kind and stream, of the run and then of each rank; counts of several ranks
    are each rank's own. Each row names its run, so that files of many runs can be joined. ``value`` is a distribution's
    mean, of several passes the median of theirs, and a count's median."""
    rows = (row for document in documents for row in _csv_rows(document) if row["metric"].startswith(only))
    return to_csv(_CSV, (map(row.get, _CSV) for row in rows))


def _csv_rows(document: Document) -> Iterator[Document]:
    label, name = document["labels"], document["scenario"]["expanded"].get("name", "")
    run = {
        "scenario": str(name),
        "relay": engine_name(label["engine"]) if label.get("engine") else document["relay"]["state"],
        "label": numbers(label),
        "host": label["host"],
        "digest": document["outputs"].get("digest", ""),
    }
    for part in (document, *document.get("ranks", ())):
        rank = {} if part is document else {"rank": part["name"], "role": part["role"]}
        counts = () if document.get("ranks") and part is document else _count_rows(part)
        for row in (*_metric_rows(part), *counts, *_worth_rows(part)):
            yield run | rank | row
    for kind, reason in document.get("not_asked", {}).items():
        yield run | {"metric": f"expect.{kind}", "abstained": f"not asked: {reason}"}


def _metric_rows(part: Document) -> Iterator[Document]:
    ranges = part.get("ranges", {}).get("metrics", {})
    for name, metric in part["metrics"].items():
        values, extent = metric.get("values"), ranges.get(name, {})
        figures = {figure: metric.get(figure) for figure in ("p50", "p90", "p95", "p99", "max")}
        yield {
            "metric": name,
            "unit": metric.get("unit"),
            "value": float(median(values)) if values else None,
            "abstained": metric.get("abstained"),
            **{figure: value for figure, value in figures.items() if isinstance(value, float | int)},
            **{end: extent.get(end) for end in ("low", "high")},
        }


def _count_rows(part: Document) -> Iterator[Document]:
    for kind, streams in part["per_step"].items():
        for stream, counters in streams.items():
            if stream != "steps":
                for counter, tally in counters.items():
                    median = {"unit": "median/step", "value": tally["median"]}
                    yield {"metric": f"{kind}.{stream}.{counter}", **median, **tally}


def _worth_rows(part: Document) -> Iterator[Document]:
    """One row per figure that a counterfactual run changes: ``worth.PLACE.CHANGE.FIGURE``."""
    units = {"output_throughput_pct": "%", "ttft_ms": "ms", "tpot_ms": "ms", "idle_us_per_step": "us"}
    for row in part.get("worth", {}).get("rows", ()):
        for figure, unit in units.items():
            name = f"worth.{place(row)}.{row['change']}.{figure}"
            yield {"metric": name, "unit": unit, "value": row[figure], "abstained": row["abstained"]}
