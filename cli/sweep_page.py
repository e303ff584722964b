"""The page of a sweep: a grid over two axes or a list over more, and where the sign changes."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from ..profiles.record.conclusion import number_of, numbers
from ..profiles.sweeps.conclusion import SEEDS, beyond
from ..scenarios.overrides import as_numbers
from .charts import Chart, ChartKind, Point
from .page import WIDE, Document, Page, framed, to_csv
from .result_page import host_time
from .text import MISSING, number, signed

_COLORS = {"better": "green", "worse": "red"}
_TEXTS = ("candidate", "tokens", "refused", "remark")  # of a cell
FEW = 36  # cells of a list in the first screenful


def page(document: Document, width: int = WIDE, *, few: bool = False) -> Page:  # noqa: ARG001
    """``few``: only some rows of the table are shown."""
    most = FEW if few else None
    return Page(
        f"sweep {document['scenario']['name']}",
        [Text(setting(document)), table(document, most), *map(Text, notes(document)), *charts(document)],
        document["conclusion"],
        footer=(f"`{document['run']['command']}`",),
    )


def as_csv(document: Document) -> str:
    """One row per cell."""
    sides = ["a", "b"] if _compares(document) else ["value"]
    label = document["labels"] and numbers(document["labels"])
    rows = []
    for cell in document["cells"]:
        values = cell["values"] or [None] * len(sides)
        rows.append([*cell["at"], *values, cell["delta_pct"], *map(cell.get, _TEXTS), label])
    return to_csv([*_keys(document), *sides, "delta_pct", *_TEXTS, "label"], rows)


def setting(document: Document) -> str:
    """What kind of numbers these are."""
    labels = document["labels"]
    parts = ["no run"]
    if labels is not None:
        kind = numbers(labels, " and ".join(document.get("hardware", ())))
        parts = [kind, *host_time(labels, labels.get("engine")), SEEDS]
    parts.append("Δ %" if _compares(document) else document["sweep"]["unit"] or "no unit")
    if document["sweep"]["direction"]:
        parts.append(f"{document['sweep']['direction']} is better")
    parts += [] if not document["run"]["cancelled"] else ["cancelled: partial"]
    return " · ".join(parts)


def table(document: Document, most: int | None = None) -> Table:
    """A grid over one or two axes, a list over more."""
    return _grid(document) if len(_keys(document)) <= 2 else _list(document, most)


def notes(document: Document) -> list[str]:
    """The reasons of refused cells, requests that were not served, differing tokens, and that a cell is no verdict."""
    marks = _marks(document)
    remarks = [f"{mark} {reason}" for reason, mark in marks.items()]
    if any(cell["tokens"] == "different" for cell in document["cells"]):
        remarks.append("≠ the sides' tokens differ: not judged, since their work is not the same")
    if document["break_even"] and document["sweep"].get("not_drawn"):
        remarks.append(
            "not asked: between which values the break-evens lie over the ranges of the hardware's constants, because "
            + document["sweep"]["not_drawn"]
        )
    if _compares(document):
        noise = " and measured times" * (document["sweep"]["exact"] is False)
        remarks.append(f"one run per side{noise}: `schedbench compare` gives the verdict over workload seeds")
    return remarks


def _grid(document: Document) -> Table:
    """The first axis across, the second down."""
    first, *others = document["sweep"]["axes"]
    cells = {tuple(cell["at"]): cell for cell in document["cells"]}
    corner = " / ".join(axis["key"] for axis in (*others, first))
    last = ["break-even"] if _compares(document) else []
    found = framed("", corner, *(f">{value}" for value in first["values"]), *last)
    for row in [(value,) for value in others[0]["values"]] if others else [()]:
        line = [cells.get((value, *row)) for value in first["values"]]
        end = [_break_even(document, row)] if _compares(document) else []
        found.add_row(*row or ("",), *(_figure(cell, document) for cell in line), *end)
    return found


def _list(document: Document, most: int | None) -> Table:
    """The first axis varies fastest, so that a change of sign lies between neighbouring rows."""
    figures = [">Δ %", "break-even"] if _compares(document) else [f">{document['sweep']['unit'] or ''}"]
    hidden = len(document["cells"]) - most if most is not None else 0
    caption = f"and {number_of(hidden, 'more cell')} with --all" if hidden > 0 else ""
    found = framed("", *_keys(document), *figures, caption=caption)
    order = [axis["values"] for axis in document["sweep"]["axes"]]
    cells = sorted(
        document["cells"],
        key=lambda cell: [v.index(x) for v, x in zip(order[::-1], cell["at"][::-1], strict=True)],
    )
    for cell in cells[:most]:
        row = tuple(cell["at"][1:])
        last = cell["at"][0] == order[0][-1]
        end = [_break_even(document, row) if last else ""] if _compares(document) else []
        found.add_row(*cell["at"], _figure(cell, document), *end, end_section=last)
    return found


def _figure(cell: Document | None, document: Document) -> Text:
    if cell is None:
        return Text(MISSING)
    mark = f" {_marks(document)[reason]}" if (reason := _reason(cell)) else ""
    if cell["refused"]:
        return Text(f"{MISSING}{mark}")
    doubt = " ≠" if cell["tokens"] == "different" else ""
    if not _compares(document):
        return Text(number(cell["values"][0]) + mark)
    return Text(signed(cell["delta_pct"]) + doubt + mark, style=_COLORS.get(cell["candidate"], ""))


def _break_even(document: Document, row: tuple[str, ...]) -> str:
    """The values of the first axis between which the candidate turns from better to worse, or back."""
    found = [entry for entry in document["break_even"] if tuple(entry["at"].values()) == row]
    if found:
        return ", ".join(_change(entry, beyond(document, entry)) for entry in found)
    seen = [cell["candidate"] for cell in document["cells"] if tuple(cell["at"][1:]) == row]
    tones, planned = sorted(filter(None, seen)), len(document["sweep"]["axes"][0]["values"])
    if len(tones) < planned:
        return f"{planned - len(tones)} of {planned} not judged"
    always = " or ".join(dict.fromkeys(tones))
    return always if always == "no change" else f"always {always}"


def _change(entry: Document, side: str) -> str:
    """A change of sign to that side, in how many draws of the hardware's constants it is, and between which values."""
    between, drawn = " … ".join(entry["between"]), entry["drawn"]
    if drawn is None:
        return f"{between}: {side}"
    firm = f"{drawn['holding']} of {drawn['draws']} draws, {drawn['low']} … {drawn['high']}"
    if drawn["stands"]:
        return f"{between}: {side} ({firm})"
    why = f"follows {drawn['constant']}, rank correlation {drawn['correlation']:+.2f}"
    return f"{between}: inconclusive: CONSTANTS ({firm}; {why})"


def _reason(cell: Document) -> str:
    """Why the cell has no value, or whose requests its value leaves out or shortens."""
    return cell["refused"] or cell.get("remark") or ""


def _marks(document: Document) -> dict[str, str]:
    """The number of the footnote for each reason."""
    reasons = dict.fromkeys(filter(None, map(_reason, document["cells"])))
    return {reason: f"[{number}]" for number, reason in enumerate(reasons, start=1)}


def _keys(document: Document) -> list[str]:
    return [axis["key"] for axis in document["sweep"]["axes"]]


def _compares(document: Document) -> bool:
    return len(document["sweep"]["sides"]) == 2


def charts(document: Document) -> Iterator[Chart]:
    """The metric, or its change, over the first axis; one line for each combination of the others."""
    first, *others = document["sweep"]["axes"]
    kind: ChartKind
    numbers = as_numbers(first["values"])
    points: list[Point] = []
    for cell in (cell for cell in document["cells"] if cell["values"]):
        value = cell["delta_pct"] if _compares(document) else cell["values"][0]
        series = ", ".join(f"{axis['key']} {at}" for axis, at in zip(others, cell["at"][1:], strict=True))
        at = cell["at"][0]
        place = {"x": float(at), "y": value} if numbers else {"x": value, "y": f"{first['key']} {at}"}
        points.append({**place, **({"series": series} if series else {})})
    unit = "Δ %" if _compares(document) else document["sweep"]["unit"] or ""
    kind, across, up = ("line", first["key"], unit) if numbers else ("bar", unit, "")
    if points:
        yield Chart(document["sweep"]["metric"], kind, across, up, points)
