"""The page of ``calibrate``: host phases, constants of the device, and the errors of declared host times."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from .page import Document, Page, framed
from .text import MISSING, number, percent, whole


def page(document: Document) -> Page:
    missing = [Text(f"as in {document['base']}: {line}") for line in document["missing"]]
    device = [_device(document)] if document["device"] else []
    errors = [_errors(document["judged"])] if "judged" in document else []
    return Page("calibration", [_phases(document), *device, *errors, *missing], document["conclusion"])


def _phases(document: Document) -> Table:
    left_out = (
        f"left out: {document['through_torch_ns']:.0f} ns per device call, torch's way to it; "
        f"in no phase: {document['outside_us_per_step']:.1f} us per step\n"
        "worst: a size's median over the line there, where a prompt of that size takes longer than a decode"
    )
    title = f"host phases, a + b * n, ns · {document['machine']} · {document['date']}"
    fit = (">a", ">b", ">samples", ">sizes", ">residual", ">R2", ">worst", ">at n", ">old a", ">old b")
    table = framed(title, "phase", *fit, caption=left_out, no_wrap=True)
    for name, line in _lines(document["phases"]):
        old = line.get("old") or {"a": None, "b": None}
        r2 = MISSING if line["r2"] is None else f"{line['r2']:.2f}"
        table.add_row(
            name, number(line["a"]), number(line["b"]), number(line["samples"]), number(line["sizes"]),
            number(line["residual"]), r2, f"x {number(line['worst'])}", number(whole(line["worst_n"])),
            number(old["a"]), number(old["b"]),
        )  # fmt: skip
    return table


def _lines(phases: Document) -> Iterator[tuple[str, Document]]:
    """Each phase, and below it the kinds of steps that have a line of their own."""
    for name, line in phases.items():
        yield name, line
        yield from ((f"  {kind}", of_kind) for kind, of_kind in line.get("kinds", {}).items())


def _errors(judged: Document) -> Table:
    signs = judged["signs"]
    table = framed(
        "declared host times against this machine's, on one virtual device",
        *("scenario", "state", "metric", "unit", ">declared", ">measured", ">error %"),
        caption=f"median error {percent(judged['median_error'])} %; of changes that both call "
        f"{signs['agree']} signs agree and {signs['differ']} differ",
        no_wrap=True,
    )
    for row in judged["errors"]:
        table.add_row(
            *(row[name] for name in ("scenario", "state", "metric", "unit")),
            *(number(row[name]) for name in ("emulated", "measured")),
            _error(row),
        )
    return table


def _error(row: Document) -> str:
    """The relative error in percent, or the absolute one with its unit where 0 was measured."""
    return percent(row["error"]) if row["absolute"] is None else f"{row['absolute']:+.4g} {row['unit']}"


def _device(document: Document) -> Table:
    table = framed("device", "constant", ">value", ">old", no_wrap=True)
    table.add_column("from")
    for row in document["device"]:
        table.add_row(row["key"], number(row["value"]), number(row["old"]), row["basis"])
    return table
