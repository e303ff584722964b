"""Copies, host waits, hazards, and what counterfactual runs found, by source line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from rich import containers
from rich.console import Console, ConsoleOptions, JustifyMethod, OverflowMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..profiles.measure.steps import is_iteration
from ..profiles.record.conclusion import number_of
from ..profiles.record.result import PROGRAM, CopyRow
from .console import PrintableConsole
from .page import WIDE, Document, Lines, folded_paths, framed, ordered_kinds
from .text import MISSING, number, size

LINES = 40  # source lines shown in a table
_SUMMED = {"count", "steady", "bytes", "host_us", "exposed_us"}
CHANGES: Final = {
    "no wait": "does not wait",
    "pinned": "pinned, async",
    "absent": "is not there",
    "half": "takes half",
}
_FIGURES: Final = {  # heading by field
    "output_throughput_pct": ">tokens/s\n%",
    "ttft_ms": ">TTFT\nms",
    "tpot_ms": ">TPOT\nms",
    "idle_us_per_step": ">idle\nµs/step",
}


def copies(result: Document) -> Table:
    """All kinds of steps together. Includes kernel copies, whose direction is ``kernel``."""
    rows = _over_kinds(result["copies"], ("stream", "direction", "host_memory", "blocking"))
    rows.sort(key=lambda row: (-row["count"], -row["bytes"]))
    table = _lines("copies by source line", result, rows, ("count", "bytes"), LINES, tight=False)
    for row in rows[:LINES]:
        table.add_row(*_line(row, _copy(row)), number(row["count"]), size(row["bytes"]))
    return table


def _over_kinds(rows: Sequence[Document], alike: Sequence[str]) -> list[Document]:
    """Joins rows that differ only in the kind of step. ``kind`` of a joined row lists the kinds."""
    joined: dict[tuple[object, ...], Document] = {}
    for row in rows:
        site = row["site"]
        key = (site and (site["file"], site["line"]), row["range"], *(row[name] for name in alike))
        if key not in joined:
            joined[key] = {**row, "kind": []} | dict.fromkeys(_SUMMED & row.keys(), 0)
        for name in _SUMMED & row.keys():
            joined[key][name] += row[name]
        joined[key]["kind"].append(row["kind"])
    return [row | {"kind": ", ".join(ordered_kinds(row["kind"]))} for row in joined.values()]


def _copy(row: Document) -> str:
    return CopyRow.model_construct(**row).what


def host_waits(result: Document, *, lines: int = LINES) -> Table:
    """Calls that waited for the device. A wait is exposed while the GPU had no forward to run, else hidden; in a
    program without steps it is neither. What a line is worth is neither of the two: a wait also keeps the host's work
    behind it from overlapping the forward."""
    asked = result["worth"]["rows"] if "worth" in result else ()
    known = [row for row in asked if row["site"] and row["change"] == "absent" and row["step_us"] is not None]
    worth = {_place(row): -row["step_us"] for row in known} if "worth" in result else None
    steps = 0 if PROGRAM in result["per_step"] else _steps(result)
    copied = _over_kinds(result["copies"], ("stream", "direction", "host_memory", "blocking"))
    rows = [(row, _copy(row)) for row in copied]
    rows += [(row, row["call"]) for row in _over_kinds(result["syncs"], ("stream", "call"))]
    rows = [(row, what) for row, what in rows if row["host_us"] > 0]
    rows.sort(key=lambda entry: (-entry[0]["exposed_us"], -entry[0]["host_us"]))
    figures = ("hidden\nµs/step", "exposed\nµs/step") if steps else ("waited\nµs",)
    figures = ("count", *figures) if worth is None else (*figures, "worth\nµs/step")
    table = _lines("where the host waited", result, rows, figures, lines, tight=worth is not None)
    for row, what in rows[:lines]:
        waited, exposed = row["host_us"], row["exposed_us"]
        shown = [(waited - exposed) / steps, exposed / steps] if steps else [waited]
        shown = [row["count"], *shown] if worth is None else [*shown, worth.get(_place(row))]
        table.add_row(*_line(row, what), *map(number, shown))
    return table


def _place(row: Document) -> tuple[str, int]:
    site = row["site"]
    return (site["file"], site["line"]) if site else ("", 0)


def _steps(result: Document) -> int:
    """The steps that ran a forward, as ``host_stall_us_per_step`` has them, of all ranks, which the source lines are
    of."""
    of_ranks = [rank["metrics"] for rank in result.get("ranks", ())] or [result["metrics"]]
    found = [(name.partition("forward_ms.")[2], one) for metrics in of_ranks for name, one in metrics.items()]
    return sum(one.get("n") or 0 for kind, one in found if kind and is_iteration(kind))


def _lines(
    title: str, result: Document, rows: Sequence[object], figures: Iterable[str], lines: int, *, tight: bool
) -> Table:
    """A table whose first two columns are a source line and what it did."""
    hidden = len(rows) - lines
    caption = "" if rows or result["per_step"] else "no step was recorded"
    caption = f"and {number_of(hidden, 'more line')}" if hidden > 0 else caption
    headings = ("~source line", "~what", *(f">{figure}" for figure in figures))
    return framed(title, *headings, caption=caption, no_wrap=True, tight=tight)


class _Statement(Text):
    """A statement below its place, of which a console may show only the first lines."""

    def wrap(
        self,
        console: Console,
        width: int,
        *,
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        tab_size: int = 8,
        no_wrap: bool | None = None,
    ) -> containers.Lines:
        place, *others = self.split(allow_blank=True)
        place = folded_paths(place, width)
        most = console.statement_lines if isinstance(console, PrintableConsole) else None
        found = containers.Lines()
        for part in (place, *others):
            lines = part.wrap(
                console, width, justify=justify, overflow=overflow, tab_size=tab_size, no_wrap=no_wrap
            )
            if part is not place and most is not None and len(lines) > most:
                lines = containers.Lines(lines[:most])
                lines[-1].truncate(width - 1)
                lines[-1].rstrip()
                lines[-1].append("…")
            found.extend(lines)
        return found


class _What(Text):
    """What a source line did, in a column that is narrow on a narrow console, so that most lines are not folded."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = 22 if console.width < WIDE else 40
        return super().__rich_measure__(console, options).clamp(max_width=widest)


def source_line(row: Document) -> Text:
    """File, line and statement; without a line the range."""
    site = row["site"]
    where = f"{site['file']}:{site['line']}" if site else row["range"] or "unknown line"
    return _Statement.assemble(where, ("\n" + (site["statement"] if site else MISSING), "dim"))


def _line(row: Document, what: str) -> tuple[Text, Text]:
    place = " · ".join(word for word in (row["stream"], row["range"], row["kind"]) if word)
    return source_line(row), _What.assemble(what, ("\n" + place, "dim"))


def hazard_count(hazards: Document) -> str:
    """A summary in a few words; empty where hazards were not watched for."""
    if "abstained" in hazards:
        return ""
    parts = [f"{len(hazards['findings'])} undeclared"] if hazards["findings"] else []
    parts += [f"known: {', '.join(hazards['known'])}"] if hazards["known"] else []
    return "; ".join(parts) or "none"


def hazards(result: Document, title: str) -> Iterator[Lines]:
    """Undeclared findings: the resource, the ordering that is missing between its accesses, and their source lines."""
    if found := result["hazards"].get("findings"):
        yield Lines([Text(), Text(title, style="bold red"), *chain.from_iterable(map(_hazard, found))])


def _hazard(finding: Document) -> Iterator[Text]:
    yield Text.assemble((f"{finding['resource']}: ", "bold"), finding["missing"])
    sites = [access["site"] for access in (finding["first"], finding["second"]) if access]
    places = [f"    {site['file']}:{site['line']}  {site['statement']}" for site in sites if site]
    yield from (Text(place, style="dim") for place in dict.fromkeys(places))


def hazard_lines(hazards: Document) -> str:
    """Undeclared findings, a line each."""
    return "\n".join(
        f"hazard: {finding['resource']}: {finding['missing']}" for finding in hazards["findings"]
    )


def worth_tables(result: Document, *, lines: int) -> tuple[Table, ...]:
    """``lines``: hidden ones that are shown."""
    rows = result["worth"]["rows"]
    hidden = [row for row in rows if row["hidden"]]
    none = "none was asked" if result["run"].get("further_cancelled") else "nothing gains in this scenario"
    gains = _gains([row for row in rows if not row["hidden"]], none=none)
    return gains, *((_hidden(hidden, lines=lines),) if hidden else ())


def _gains(rows: list[Document], *, none: str) -> Table:
    void = Counter(row["abstained"] for row in rows if row["abstained"])
    notes = ["differences to the run as it is, in this scenario"]
    notes += [f"{count} without figures: {reason}" for reason, count in void.items()]
    if any(row.get("needed") for row in rows):
        notes.append("needed: accesses would race without the line, so that only a finer order can gain")
    caption = "; ".join(notes) if rows else none
    headings = ("~source line, or host phase", "~if it", *_FIGURES.values())
    table = framed("what would it be worth", *headings, caption=caption, no_wrap=True, tight=True)
    for row in rows:
        said = Text.assemble(CHANGES[row["change"]], ("\n" + ", ".join(row["kinds"]), "dim"))
        said.append("\nneeded" * row.get("needed", False))
        table.add_row(_where(row), said, *(_signed(row[name]) for name in _FIGURES))
    return table


def _hidden(rows: list[Document], *, lines: int) -> Table:
    more = f"; and {len(rows) - lines} more{' with --all' * (lines < LINES)}" if len(rows) > lines else ""
    if not all(row["room_us"] for row in rows):
        more += (
            f"; {MISSING}: --rooms {len(rows)} finds how much longer all of them would have to take to show"
        )
    headings = ("~source line, or host phase", "~what", ">shows with\nµs/step more")
    caption = f"no figure gains 0.1 % without them{more}"
    table = framed("hidden here", *headings, caption=caption, no_wrap=True, tight=True)
    for row in rows[:lines]:
        said = _What.assemble(row["what"], ("\n" + ", ".join(row["kinds"]), "dim"))
        table.add_row(_where(row), said, _shows(row["room_us"]))
    return table


def _where(row: Document) -> Text:
    if row["site"] is None:
        return Text.assemble(f"phase {row['phase']}", ("\nits own host time", "dim"))
    return source_line(row)


def _shows(room: list[float] | None) -> str:
    if room is None:
        return MISSING
    low, high = room
    return f"> {number(int(low))}" if high is None else f"{number(int(low))} … {number(int(high))}"


def _signed(value: float | None) -> str:
    text = number(value)
    return f"+{text}" if value and value > 0 and text[0] != "<" else text
