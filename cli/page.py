"""Pages: the paragraphs and tables that a command prints, and one writer for each format."""

from __future__ import annotations

import csv
import io
import json as json_text
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeGuard, get_args

from rich import box
from rich.console import Console
from rich.measure import measure_renderables
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..profiles.picture.model import Picture, Scene
from ..sched.observe import StepKind
from .arguments import Format
from .charts import Chart, svg
from .console import PIPED_WIDTH, results
from .errors import UsageError
from .strip import strips
from .text import MISSING, echo, printable, printable_json

Document = dict[str, Any]

WIDE: Final = PIPED_WIDTH
NARROW: Final = 100  # of a picture in Markdown
FOLDED: Final = 2  # lines of a statement in the first screenful
_TIGHT: Final = (0, 1, 0, 0)
UNLIMITED: Final = 100_000  # of a page that wraps and scrolls by itself: nothing is cut


class Lines(NamedTuple):
    """Lines whose breaks matter: a code block in Markdown."""

    lines: Sequence[Text]


class Drawing(NamedTuple):
    """A picture of a few steps: characters in a terminal and in Markdown."""

    picture: Picture


Drawn = Sequence[Scene | Chart]  # of timelines
Block = Text | Lines | Table | Drawing | Chart


class Page(NamedTuple):
    """``title`` is that of the HTML page: the command and the scenario. ``conclusion`` is the first line; empty where
    the document has none. Markdown also has the ``footer``. ``rest``: titles of the tables that are not in the first
    screenful, which a terminal leaves out and Markdown folds unless every table is asked for."""

    title: str
    blocks: Sequence[Block]
    conclusion: str = ""
    footer: Sequence[str] = ()
    rest: Collection[str] = ()


def framed(
    title: str, *headings: str, caption: str = "", no_wrap: bool = False, tight: bool = False
) -> Table:
    """An empty table in the one frame that all tables have. A column whose heading begins with ``>`` is aligned to the
    right; one that begins with ``~`` has text, which is folded. ``no_wrap`` is about all others. ``tight``: with small
    gaps between columns."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=_TIGHT if tight else (0, 1),
        pad_edge=False,
        show_edge=False,
    )
    for heading in headings:
        name, mark = heading.lstrip(">~"), heading[:1]
        if mark == "~":
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right" if mark == ">" else "left", no_wrap=no_wrap)
    return table


def ordered(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """In the order of ``known``, then all others by name."""
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def ordered_kinds(kinds: Iterable[str]) -> list[str]:
    """Kinds of steps in the order of ``StepKind``, ``decode.steady`` after ``decode``."""
    places = {kind: place for place, kind in enumerate(get_args(StepKind))}
    return sorted(kinds, key=lambda kind: (places.get(kind.partition(".")[0], len(places)), kind))


def show(
    form: Format,
    page: Callable[[int], Page],
    *,
    json: Callable[[], str],
    csv: Callable[[], str] | None = None,
    every_table: bool = False,
) -> None:
    """Print a document on stdout in the format that the user chose. ``page`` makes its page for a width in columns.
    ``every_table``: also the tables behind the first screenful, none is folded, and no statement is cut."""
    console = results()
    match form:
        case "table":
            console.statement_lines = None if every_table else FOLDED
            whole = page(console.width)
            print_page(whole if every_table else screenful(whole), console)
        case "md":
            found = page(WIDE)
            sys.stdout.write(printable(markdown(found._replace(rest=()) if every_table else found)))
        case "html":
            from .html_page import to_html

            sys.stdout.write(to_html(page(UNLIMITED)))
        case "svg":
            sys.stdout.write(_svg(page(UNLIMITED)))
        case "json":
            sys.stdout.write(printable_json(json()))
        case "csv":
            sys.stdout.write(printable(csv() if csv is not None else tables_csv(page(UNLIMITED))))


def show_entries(form: Format, title: str, entries: Sequence[Mapping[str, Any]], text: str) -> None:
    """Print records with the same fields: ``text`` in a terminal, else a table of the fields with a single value, and
    all of them as JSON."""
    if form == "table":
        echo(text)
        return
    first = entries[0] if entries else {}
    names = [name for name in first if not any(isinstance(e[name], dict | list | tuple) for e in entries)]
    rows = [["" if entry[name] is None else str(entry[name]) for name in names] for entry in entries]
    table = framed(title, *names)
    for row in rows:
        table.add_row(*row)
    document = json_text.dumps(entries, indent=1, ensure_ascii=False) + "\n"
    show(form, lambda _: Page(title, [table]), json=lambda: document, csv=lambda: to_csv(names, rows))


def with_picture(page: Page, drawn: Drawn) -> Page:
    """The page with its picture in front of its tables, and with the charts of timelines behind them."""
    picture = tuple(one for one in drawn if isinstance(one, Scene))
    charts = [one for one in drawn if isinstance(one, Chart)]
    at = next((n for n, block in enumerate(page.blocks) if isinstance(block, Table)), len(page.blocks))
    drawing = [Drawing(picture)] if picture else []
    return page._replace(blocks=[*page.blocks[:at], *drawing, *page.blocks[at:], *charts])


def screenful(page: Page) -> Page:
    """The page without the rest, whose titles are named behind the last table."""
    kept = [block for block in page.blocks if not _is_rest(block, page)]
    left_out = dict.fromkeys(str(block.title) for block in page.blocks if _is_rest(block, page))
    if left_out:
        behind = max(
            (n for n, block in enumerate(kept, start=1) if isinstance(block, Table)), default=len(kept)
        )
        kept.insert(behind, Text(f"\n--all also shows: {', '.join(left_out)}"))
    return page._replace(blocks=kept)


def _is_rest(block: Block, page: Page) -> TypeGuard[Table]:
    return isinstance(block, Table) and str(block.title) in page.rest


def print_page(page: Page, console: Console) -> None:
    """For terminals. An empty line separates a table from what is above it."""
    for number, block in enumerate(_blocks(page)):
        if isinstance(block, Table) and number:
            console.print()
        for part in _printed(block, console.width):
            if isinstance(part, Table):
                _fit(part, console)
            console.print(
                _indented_whole(part, console.width) if isinstance(part, Text) else part, markup=False
            )


def _fit(table: Table, console: Console) -> None:
    """Set the widths of the columns so that the table is no wider than the console and no cell is cut. A table that is
    too wide, and has no column of text with ``overflow="fold"``, gets smaller gaps. Then the widest column is folded
    first. Words, and cells that do not wrap, are divided only if all columns are as narrow as theirs."""
    contents = ([column.header, *column.cells] for column in table.columns)
    natural = [measure_renderables(console, console.options, cells) for cells in contents]
    texts = [column.overflow == "fold" for column in table.columns]
    least = [
        1 if text else found.maximum if column.no_wrap else found.minimum
        for column, found, text in zip(table.columns, natural, texts, strict=True)
    ]
    widths = [max(found.maximum, 1) for found in natural]
    if sum(widths) + _gaps(table) > console.width and not any(texts):
        table.padding = _TIGHT
    while sum(widths) + _gaps(table) > console.width and max(widths) > 1:
        widest = max(range(len(widths)), key=lambda at: (widths[at] > least[at], widths[at]))
        widths[widest] -= 1
    for column, found, width in zip(table.columns, natural, widths, strict=True):
        column.width, column.overflow = width, "fold"
        column.no_wrap = column.no_wrap and width >= found.maximum


def _gaps(table: Table) -> int:
    """The columns of a console that are between the columns of a table in the frame."""
    _, right, _, left = table.padding
    return (len(table.columns) - 1) * (right + 1 + left)


def _indented_whole(line: Text, width: int) -> Text | Padding:
    """The line with its indent also in front of what is folded."""
    indent = len(line.plain) - len(line.plain.lstrip(" "))
    folded = folded_paths(line[indent:], width - indent)
    return Padding.indent(folded, indent) if indent else folded


def folded_paths(line: Text, width: int) -> Text:
    """The line, with line breaks behind slashes in each word that is wider than ``width`` columns. A file's name and
    its line number stay together where they fit."""
    cuts = []
    for word in re.finditer(r"\S+", line.plain):
        start = last = word.start()
        for part in re.finditer(r"[^/]*/|[^/]+", word[0]):
            if word.start() + part.end() - start > width and last > start:
                cuts.append(last)
                start = last
            last = word.start() + part.end()
    return Text("\n").join(line.divide(cuts)) if cuts else line


def _printed(block: Block, width: int) -> Iterable[Text | Table]:
    if isinstance(block, Drawing):
        return strips(block.picture, width)
    if isinstance(block, Chart):
        return ()
    if isinstance(block, Table) and not block.row_count:
        return (Text.assemble((str(block.title), "bold"), f": {without_rows(block)}"),)
    return block.lines if isinstance(block, Lines) else (block,)


def without_rows(table: Table) -> str:
    """What stands behind the title of a table without rows, in place of its headings."""
    return str(table.caption or "none")


def _blocks(page: Page) -> Sequence[Block]:
    """What every format begins with, and the blocks."""
    return (*([Text(page.conclusion, style="bold")] if page.conclusion else ()), *page.blocks)


def markdown(page: Page) -> str:
    parts = [part for block in _blocks(page) if (part := _markdown_block(block, page.rest))]
    return "\n\n".join((*parts, *page.footer)) + "\n"


def _markdown_block(block: Block, folded: Collection[str]) -> str:
    if isinstance(block, Table):
        return _markdown_table(block, folded=str(block.title) in folded)
    if isinstance(block, Lines | Drawing | Chart):
        plain = [part.plain for part in _printed(block, NARROW) if isinstance(part, Text)]
        lines = "\n".join(plain).strip("\n")
        return f"```\n{lines}\n```" if lines else ""
    return f"**{block.plain}**" if block.style == "bold" else block.plain


def _markdown_table(table: Table, *, folded: bool) -> str:
    if not table.row_count:
        return f"**{table.title}**: {without_rows(table)}"
    caption = f"\n\n_{table.caption}_" if table.caption else ""
    body = "\n".join(markdown_rows(table)) + caption
    if folded:
        return f"<details><summary>{table.title}</summary>\n\n{body}\n\n</details>"
    return f"**{table.title}**\n\n{body}" if table.title else body


def markdown_rows(table: Table) -> list[str]:
    headings = [str(column.header).replace("\n", " ") for column in table.columns]
    columns = [map(_cell, column.cells, repeat(is_code(str(column.header)))) for column in table.columns]
    ruler = ["---:" if column.justify == "right" else "---" for column in table.columns]
    return [f"| {' | '.join(row)} |" for row in (headings, ruler, *zip(*columns, strict=True))]


def is_code(heading: str) -> bool:
    """Whether a column holds source lines with their statements."""
    return heading.startswith(("source line", "statement", "points at"))


def _cell(cell: object, code: bool) -> str:
    """The lines of a cell below each other: source code verbatim, other text with its indent."""
    lines = [_code(line) if code else _indented(line) for line in str(cell).split("\n")]
    return "<br>".join(lines).replace("|", "\\|")


def _code(line: str) -> str:
    """In a fence that is longer than any in the line."""
    if not line.strip() or line == MISSING:
        return line
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    padding = " " if "`" in (line[0], line[-1]) else ""
    return f"{fence}{padding}{line}{padding}{fence}"


def _indented(line: str) -> str:
    text = line.lstrip(" ")
    return "&nbsp;" * (len(line) - len(text)) + text.replace("<", "&lt;")


def _svg(page: Page) -> str:
    """The picture and the charts of a page under its conclusion. Raises UsageError where it has neither."""
    drawn: list[Chart | Scene] = []
    for block in page.blocks:
        if isinstance(block, Drawing):
            drawn += block.picture
        elif isinstance(block, Chart):
            drawn.append(block)
    if not drawn:
        raise UsageError("--format svg: this page has no picture")
    return svg(drawn, page.conclusion or page.title)


def tables_csv(page: Page) -> str:
    """One row per cell: its table, its row by number and by its first cell, and its column."""
    rows = []
    for block in page.blocks:
        if isinstance(block, Table):
            cells = zip(*(map(str, column.cells) for column in block.columns), strict=True)
            headings = [str(column.header).replace("\n", " ") for column in block.columns]
            for number, row in enumerate(cells, start=1):
                rows += [
                    [block.title or "", number, row[0], *pair] for pair in zip(headings, row, strict=True)
                ]
    return to_csv(("table", "row", "name", "column", "value"), rows)


def to_csv(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """None becomes an empty cell, and a number keeps all of its digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()
