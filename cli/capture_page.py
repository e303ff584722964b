"""What the page of a capture has instead of, or besides, that of a run: the tool, its notes, and the host ranges."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from ..profiles.record.definitions import shown_in
from .page import Document, framed
from .text import MISSING, number

_GRAPHS = {
    "none": "none",
    "node": "kernel by kernel",
    "graph": "whole",
    "unknown": "counted like other kernels",
}


def is_capture(result: Document) -> bool:
    return "capture" in result["labels"]


def capture_notes(result: Document) -> list[Text]:
    """What the capture lacks: these lines stand before its numbers."""
    capture = result["environment"]["capture"]
    lines = [f"{number(capture['steps'])} steps, ranges as in the map {capture['map']}"] * bool(
        capture["steps"]
    )
    lines += [f"! {note}" for note in capture["notes"]]
    if capture.get("warnings_of_the_tool"):
        lines.append(f"! the tool warned {number(capture['warnings_of_the_tool'])} times while it recorded")
    if capture.get("overhead_of_the_tool_us"):
        lines.append(f"! of the time, the tool itself took {number(capture['overhead_of_the_tool_us'])} µs")
    return [Text(line) for line in lines]


def labels(result: Document) -> list[str]:
    """The tool and how it recorded CUDA graphs. A capture has neither a relay nor a kind of host time."""
    environment = result["environment"]
    versions = environment["capture"]["versions"]
    words = [environment["source_of_counts"], versions.get("EXPORT_PRODUCT_VERSION", "")]
    schema = versions.get("EXPORT_SCHEMA_VERSION")
    words += [f"(schema {schema})"] if schema else []
    graphs = _GRAPHS.get(environment["cuda_graph_trace"], MISSING)
    return [" ".join(word for word in words if word), f"CUDA graphs: {graphs}"]


def ranges(result: Document) -> Table:
    """Host time by range, ms."""
    headings = ("range", ">n", ">mean", ">p50", ">p99", ">max")
    table = framed("host ranges, ms", *headings, caption="nested ranges count in each other")
    for name in shown_in("host ranges", result["metrics"]):
        metric = result["metrics"][name]
        if "values" in metric:
            shown = [metric.get(figure) for figure in ("p50", "p99")]
            figures = [value if isinstance(value, float | int) else None for value in shown]
            row = (metric["n"], metric["values"][0], *figures, metric["max"])
            table.add_row(name.removeprefix("range_ms."), *map(number, row))
    return table


def steps_without_device(result: Document) -> Table:
    """The steps of a capture without a GPU."""
    headings = ("step kind", ">steps", "copies, syncs and kernels")
    table = framed("steps", *headings, caption="nothing of the device was recorded")
    for kind, found in result["per_step"].items():
        table.add_row(kind, number(found["steps"]), MISSING)
    return table
