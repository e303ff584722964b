"""What lines and host phases are worth: the tables of counterfactual runs."""

from __future__ import annotations

from collections import Counter
from typing import Final

from rich.table import Table
from rich.text import Text

from .page import UNLIMITED, Document, framed
from .source_lines import LINES, source_line
from .text import MISSING, cut_right, number

GAINS: Final = "what would it be worth"
HIDDEN: Final = "hidden here"
_CHANGES: Final = {
    "no wait": "does not wait",
    "pinned": "pinned, async",
    "absent": "is not there",
    "half": "takes half",
}
_FIGURES: Final = {  # heading by field
    "output_throughput_pct": "tokens/s\n%",
    "ttft_ms": "TTFT\nms",
    "tpot_ms": "TPOT\nms",
    "idle_us_per_step": "idle\nµs/step",
}
_IF: Final = 13  # columns of a change
_TAKEN: Final = 52  # columns of everything but the source line


def tables(result: Document, *, width: int, lines: int) -> tuple[Table, ...]:
    """``lines``: hidden ones that are shown."""
    rows = result["worth"]["rows"]
    hidden = [row for row in rows if row["hidden"]]
    gains = _gains([row for row in rows if not row["hidden"]], width=width)
    return gains, *((_hidden(hidden, width=width, lines=lines),) if hidden else ())


def _gains(rows: list[Document], *, width: int) -> Table:
    void = Counter(row["abstained"] for row in rows if row["abstained"])
    notes = ["differences to the run as it is, in this scenario"]
    notes += [f"{count} without figures: {reason}" for reason, count in void.items()]
    table = framed(GAINS, caption="; ".join(notes) if rows else "nothing gains in this scenario")
    table.padding = (0, 1, 0, 0)  # more columns on 80
    table.add_column("source line, or host phase", width=_room(width), no_wrap=True)
    table.add_column("if it", width=_IF, no_wrap=True)
    for heading in _FIGURES.values():
        table.add_column(heading, justify="right", no_wrap=True)
    room = width if width == UNLIMITED else _IF
    for row in rows:
        said = Text.assemble(
            _CHANGES[row["change"]], ("\n" + cut_right(", ".join(row["kinds"]), room), "dim")
        )
        table.add_row(_where(row, _room(width)), said, *(_signed(row[name]) for name in _FIGURES))
    return table


def _hidden(rows: list[Document], *, width: int, lines: int) -> Table:
    more = f"; and {len(rows) - lines} more{' with --all' * (lines < LINES)}" if len(rows) > lines else ""
    what = width if width == UNLIMITED else min(max(width - _room(width) - 20, 24), 44)
    table = framed(
        HIDDEN,
        caption=f"no figure gains 0.1 % without them{more}{_unasked(rows)}",
    )
    table.padding = (0, 1, 0, 0)
    table.add_column("source line, or host phase", width=_room(width), no_wrap=True)
    table.add_column("what", width=what, no_wrap=True)
    table.add_column("shows with\nµs/step more", justify="right", no_wrap=True)
    for row in rows[:lines]:
        kinds = ("\n" + cut_right(", ".join(row["kinds"]), what), "dim")
        table.add_row(
            _where(row, _room(width)),
            Text.assemble(cut_right(row["what"], what), kinds),
            _shows(row["room_us"]),
        )
    return table


def _where(row: Document, room: int) -> Text:
    if row["site"] is None:
        return Text.assemble(f"phase {row['phase']}", ("\nits own host time", "dim"))
    return source_line(row, room)


def _unasked(rows: list[Document]) -> str:
    if all(row["room_us"] for row in rows):
        return ""
    return f"; {MISSING}: --rooms {len(rows)} finds how much longer all of them would have to take to show"


def _shows(room: list[float] | None) -> str:
    if room is None:
        return MISSING
    low, high = room
    return f"> {number(int(low))}" if high is None else f"{number(int(low))} … {number(int(high))}"


def _signed(value: float | None) -> str:
    text = number(value)
    return f"+{text}" if value and value > 0 and text[0] != "<" else text


def _room(width: int) -> int:
    return width if width == UNLIMITED else min(max(width - _TAKEN, 24), 76)
