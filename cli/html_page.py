"""A page as one HTML file that loads nothing: tables that sort, and charts that zoom."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from markupsafe import Markup, escape
from rich.table import Table
from rich.text import Text

from .charts import Chart, spec_of
from .page import Block, Drawing, Lines, Page, is_code, without_rows
from .text import printable

TEMPLATE: Final = "page.html"
_CLASSES: Final = {"dim": "dim", "bold": "strong", "green": "good", "red": "bad", "bold red": "bad strong"}
_CODE: Final = re.compile("`([^`]+)`")


class _Section(NamedTuple):
    """A table or a chart, folded where it is not in the first screenful."""

    title: str = ""
    caption: str = ""
    folded: bool = False
    headings: Sequence[tuple[Markup, str]] = ()
    rows: Sequence[Sequence[tuple[Markup, str]]] = ()
    spec: str = ""
    lines: Sequence[Markup] = ()


def to_html(page: Page, *, charts: bool = True) -> str:
    """``charts``: with them the file has about a megabyte."""
    import jinja2

    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    found = (section for block in page.blocks for section in _sections(block, page.rest))
    sections = [section for section in found if charts or not section.spec]
    return environment.get_template(TEMPLATE).render(
        title=printable(page.title),
        conclusion=printable(page.conclusion),
        sections=sections,
        footer=[_inline(printable(line)) for line in page.footer],
        library=_library() if any(section.spec for section in sections) else "",
    )


@lru_cache(maxsize=1)
def _library() -> Markup:
    """Vega, Vega-Lite and vega-embed, which a page carries whole. It takes seconds to bundle them."""
    import vl_convert

    return Markup(
        vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed").replace("</script", "<\\/script")
    )


def _sections(block: Block, rest: Collection[str]) -> Iterator[_Section]:
    match block:
        case Table():
            yield _table(block, folded=str(block.title) in rest)
        case Drawing():
            for scene in block.picture:
                yield _Section(spec=_json(spec_of(scene)))
        case Chart():
            yield _Section(spec=_json(spec_of(block)))
        case Lines():
            if lines := [_line(line) for line in block.lines if line.plain.strip()]:
                yield _Section(lines=lines)
        case Text():
            yield _Section(lines=[_line(block)])


def _json(spec: dict[str, Any]) -> Markup:
    text = json.dumps({**spec, "width": "container"}, ensure_ascii=False, separators=(",", ":"))
    return Markup(printable(text).replace("<", "\\u003c"))


def _table(table: Table, *, folded: bool) -> _Section:
    kinds = [_column_class(str(column.header), column.justify) for column in table.columns]
    headings = [_cell(column.header) for column in table.columns]
    rows = zip(*(list(column.cells) for column in table.columns), strict=True)
    return _Section(
        title=printable(str(table.title or "")),
        caption=printable(str(table.caption or "") if table.row_count else without_rows(table)),
        folded=folded,
        headings=list(zip(headings, kinds, strict=True)),
        rows=[list(zip(map(_cell, row), kinds, strict=True)) for row in rows],
    )


def _column_class(heading: str, justify: str) -> str:
    code = "code" if is_code(heading) else ""
    return " ".join(filter(None, ("number" if justify == "right" else "", code)))


def _cell(cell: object) -> Markup:
    """Lines of a cell below each other."""
    text = cell if isinstance(cell, Text) else Text(str(cell))
    return Markup("<br>").join(_line(line) for line in text.split("\n"))


def _line(text: Text) -> Markup:
    """The line in the style of its whole or of its first part."""
    styles = [str(text.style), *(str(span.style) for span in text.spans)]
    name = next((_CLASSES[style] for style in styles if style in _CLASSES), "")
    plain = text.plain.lstrip(" ")
    content = _inline(printable("\u00a0" * (len(text) - len(plain)) + plain))
    return Markup('<span class="{}">{}</span>').format(name, content) if name else content


def _inline(text: str) -> Markup:
    """Text in backticks as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))
