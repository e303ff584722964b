"""What is different on the page of a capture: who made it, what it does not tell, and the host's ranges."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from .frames import Document, framed
from .numbers import MISSING, number

_RANGES = "range_ms."
_GRAPHS = {
    "none": "none",
    "node": "kernel by kernel",
    "graph": "whole",
    "unknown": "not told from other kernels",
}


def is_capture(result: Document) -> bool:
    return "capture" in result["labels"]


def headline(result: Document, labels: str) -> Text:
    """Its gaps stand above all numbers."""
    scenario, told = result["scenario"]["expanded"], result["environment"]["capture"]
    text = Text.assemble(
        (str(scenario.get("name", "capture")), "bold"), f"  {scenario.get('about', '')}".rstrip()
    )
    text.append(f"\n{labels}\n{number(told['steps'])} steps, ranges as in the map {told['map']}")
    for note in told["notes"]:
        text.append(f"\n! {note}")
    if told.get("warnings_of_the_tool"):
        text.append(f"\n! the tool warned {number(told['warnings_of_the_tool'])} times while it recorded")
    if told.get("overhead_of_the_tool_us"):
        text.append(f"\n! of the time, the tool itself took {number(told['overhead_of_the_tool_us'])} µs")
    return text


def labels(result: Document) -> list[str]:
    """Instead of relay and host time, which a capture knows nothing of."""
    environment = result["environment"]
    versions = environment["capture"]["versions"]
    words = [environment["source_of_counts"], versions.get("EXPORT_PRODUCT_VERSION", "")]
    schema = versions.get("EXPORT_SCHEMA_VERSION")
    words += [f"(schema {schema})"] if schema else []
    graphs = _GRAPHS.get(environment["cuda_graph_trace"], MISSING)
    return [" ".join(word for word in words if word), f"CUDA graphs: {graphs}"]


def ranges(result: Document) -> Table:
    """The host's time by range, ms."""
    table = framed("host ranges, ms", caption="nested ranges count in each other")
    table.add_column("range")
    for heading in ("n", "mean", "p50", "p99", "max"):
        table.add_column(heading, justify="right")
    for name, metric in result["metrics"].items():
        if name.startswith(_RANGES) and "values" in metric:
            shown = [metric.get(figure) for figure in ("p50", "p99")]
            figures = [value if isinstance(value, float | int) else None for value in shown]
            row = (metric["n"], metric["values"][0], *figures, metric["max"])
            table.add_row(name.removeprefix(_RANGES), *map(number, row))
    return table


def untold(result: Document) -> Table:
    """Steps of a capture without a GPU."""
    table = framed("steps", caption="nothing of the device was recorded")
    table.add_column("step kind")
    table.add_column("steps", justify="right")
    table.add_column("copies, syncs and kernels")
    for kind, found in result["per_step"].items():
        table.add_row(kind, number(found["steps"]), MISSING)
    return table
