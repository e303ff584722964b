"""The HTML page: its contents equal the document, it loads nothing, and a browser can sort and zoom it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from markupsafe import escape
from typer.testing import CliRunner

from schedbench.cli.app import app
from schedbench.cli.charts import Chart, svg
from schedbench.cli.html_page import to_html
from schedbench.cli.page import UNLIMITED, Lines, Page, Text, framed
from schedbench.cli.result_page import page as result_page
from schedbench.profiles.picture.draw import picture
from schedbench.profiles.record.recording import read_recording
from tests.cli.browsing import opened
from tests.cli.pages import TINY


class Parsed(HTMLParser):
    """Collects tables by title as rows of texts, the charts' specifications, and every attribute that could load
    something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.specs: list[dict] = []
        self.loads: list[str] = []
        self._open: list[str] = []
        self._title, self._spec = "", False
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.loads += [
            f"{tag} {name}" for name in given if name in ("src", "href", "srcset", "data", "action")
        ]
        self._spec = tag == "script" and given.get("type") == "application/json"
        if tag not in ("meta", "br"):
            self._open.append(tag)
        if tag == "summary":
            self._title = ""
        elif tag == "table":
            self.tables[self._title] = []
        elif tag == "tr":
            self.tables[self._title].append([])
        elif tag in ("td", "th"):
            self.tables[self._title][-1].append("")
        elif tag == "br" and self._cell():
            self.tables[self._title][-1][-1] += "\n"

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        self._spec = False

    def handle_data(self, data):
        if self._spec:
            self.specs.append(json.loads(data))
        elif "summary" in self._open:
            self._title += data
        elif self._cell():
            self.tables[self._title][-1][-1] += data

    def _cell(self) -> bool:
        return "td" in self._open or "th" in self._open


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    kept = tmp_path_factory.mktemp("kept")
    done = CliRunner().invoke(app, ["run", "mixed", *TINY, "--output-dir", str(kept), "--format", "html"])
    assert done.exit_code == 0
    (kept / "page.html").write_text(done.output)
    return kept


@pytest.fixture(scope="module")
def document(folder) -> dict:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def html(folder) -> str:
    return (folder / "page.html").read_text()


@pytest.fixture(scope="module")
def parsed(html) -> Parsed:
    return Parsed(html)


def test_the_tables_equal_those_of_the_page_untruncated(document, parsed):
    tables = {
        block.title: [[str(cell) for cell in column.cells] for column in block.columns]
        for block in result_page(document, UNLIMITED).blocks
        if hasattr(block, "columns")
    }
    assert parsed.tables.keys() == tables.keys()
    for title, columns in tables.items():
        found = [[cell.replace("\xa0", " ") for cell in row] for row in parsed.tables[title][1:]]
        assert found == [list(row) for row in zip(*columns, strict=True)]
    statements = {row["site"]["statement"] for row in document["copies"] if row["site"]}
    shown = "\n".join(row[0] for row in parsed.tables["copies by source line"])
    assert len(max(statements, key=len)) > 100
    assert all(statement in shown for statement in statements)


def test_charts_have_the_instants_of_the_document(document, parsed, folder):
    specs = {spec["title"]["text"]: spec for spec in parsed.specs}
    scenes = picture({"": read_recording(folder / "timeline.jsonl.gz")})
    for scene in scenes:
        bars = specs[scene.title]["layer"][0]["data"]["values"]
        assert [(bar["lane"], bar["start"], bar["end"]) for bar in bars] == [
            (lane.label, piece.start / 1e3, piece.end / 1e3) for lane in scene.lanes for piece in lane.slices
        ]
    kv = specs["KV in use"]["data"]["values"]
    assert max(point["y"] for point in kv) == document["metrics"]["peak_kv_tokens"]["values"][0]
    load = specs["requests over time"]["data"]["values"]
    ends = max(row["finish"] for row in document["requests"]) / 1e6
    assert max(point["x"] for point in load) == ends and load[-1]["y"] == 0
    shares = specs["latency of requests: share that is at most as long"]["data"]["values"]
    times = sorted((row["first_token"] - row["arrival"]) / 1e6 for row in document["requests"])
    assert [point["x"] for point in shares if point["series"] == "TTFT"] == times


def test_the_title_is_short_and_the_conclusion_and_tables_are_headings(document, html, parsed):
    assert "<title>run mixed</title>" in html
    assert f"<h1>{escape(document['conclusion'])}</h1>" in html
    plain = to_html(result_page(document, UNLIMITED), charts=False)
    assert re.findall("<h2>(.*?)</h2>", plain) == [str(escape(title)) for title in parsed.tables]
    empty = to_html(Page("verify", [framed("where the host waited", "source line")]))
    assert "<h1>verify</h1>" in empty and '<p class="caption">none</p>' in empty and "<table>" not in empty


def test_a_page_loads_nothing(html, parsed):
    assert parsed.loads == []
    assert "default-src 'none'" in html
    head = html[: html.index("<body>")]
    assert "url(" not in head and "@import" not in head


def test_text_cannot_become_markup():
    """Names come from files and command lines."""
    table = framed("<b>", "source line")
    table.add_row(Text("</script><script>alert(1)"))
    hostile = Page("<i>", [Lines([Text("<u>\x1b[31m")]), table], "`x` & <s>", footer=("`<em>`",))
    text = to_html(hostile)
    for tag in ("<b>", "<i>", "<u>", "<s>", "<em>", "<script>alert", "\x1b"):
        assert tag not in text
    assert "<code>&lt;em&gt;</code>" in text


def test_a_page_without_charts_has_no_library(document, html):
    plain = to_html(result_page(document, UNLIMITED), charts=False)
    assert len(plain) < 200_000 < len(html) < 2_000_000
    assert "vegaEmbed" not in plain and not Parsed(plain).specs


def test_a_comparison_is_rows_and_a_picture(folder):
    """test_every_format.py has the other formats."""
    rows, drawn = (
        CliRunner().invoke(app, ["compare", *[str(folder / "result.json")] * 2, "--format", form]).output
        for form in ("csv", "svg")
    )
    assert rows.startswith("metric,unit,direction,a,b,") and "\nprefill.schedule.sync,mean/step," in rows
    assert drawn.startswith("<svg") and "A forward" in drawn and "B forward" in drawn
    assert "emulated" in drawn
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", drawn)


def test_labels_of_an_axis_do_not_touch() -> None:
    """The last label ends at the end of the axis, so that it is nearer to its neighbour than the others are."""
    drawn = svg([Chart("", "bar", "", "", [{"x": 15.9, "y": "a"}])], "")
    shown = re.findall(r'<text [^>]*translate\(([\d.]+),15\)"[^>]* opacity="1">[\d.]+<', drawn)
    # "16.0" is 18 wide, and its neighbour has its middle at its value.
    assert float(shown[-1]) - float(shown[-2]) > 34


# Sorts the table that has a column of means, zooms the first chart by its buttons, and points at its first bar.
IN_BROWSER = """(async () => {
  const until = async test => { while (!test()) await new Promise(wake => setTimeout(wake, 50)); };
  const figures = [...document.querySelectorAll("figure")];
  await until(() => figures.every(figure => figure.querySelector("svg")));
  for (const closed of document.querySelectorAll("details")) closed.open = true;
  const found = { width: document.documentElement.scrollWidth - innerWidth, columns: [], domains: [] };
  const heading = [...document.querySelectorAll("th")].find(cell => cell.textContent.trim() === "mean");
  if (heading) {
    const place = heading.cellIndex, rows = heading.closest("table").tBodies[0].rows;
    const column = () => [...rows].map(row => row.cells[place].textContent);
    found.columns.push(column());
    for (let n = 0; n < 2; n++) { heading.querySelector("button").click(); found.columns.push(column()); }
  }
  const chart = figures[0]?.querySelector(".chart"), bar = chart?.querySelector(".mark-rect path");
  if (chart) {
    const domain = () => chart.view.scale("x").domain();
    found.domains.push(domain());
    for (const button of figures[0].querySelectorAll("nav button")) {
      button.click();
      await chart.view.runAsync();
      found.domains.push(domain());
    }
  }
  if (bar) {
    const box = bar.getBoundingClientRect();
    const at = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true };
    for (const kind of ["pointermove", "mousemove"]) bar.dispatchEvent(new MouseEvent(kind, at));
    found.tooltip = document.querySelector("#vg-tooltip-element")?.innerText;
  }
  document.found = found;
})()"""


@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_sorts_and_zooms_in_a_browser_without_errors(folder, width):
    found, console = opened(folder / "page.html", IN_BROWSER, width)
    assert not console
    assert found["width"] <= 0
    assert "host work" in found["tooltip"] and "undefined" not in found["tooltip"]
    _, falling, rising = ([float(text.replace(",", "")) for text in column] for column in found["columns"])
    assert sorted(falling) == rising == falling[::-1] and falling[0] > falling[-1]
    _assert_zooms(found["domains"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("command", "zooms"),
    [
        (("compare", "mixed", "--a", "relay=pr25945", *TINY[2:]), True),
        (("worth", "mixed", "--rooms", "0", *TINY[2:]), True),
        (("check", "mixed", *TINY[2:]), False),
        (("run", "ladder", "--set", "requests=3"), False),
        (("sweep", "mixed", *TINY[2:], "--over", "engine.page_size=1,16", "--draws", "2"), True),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_every_page_opens_in_a_browser_as_wide_as_a_telephone(command, zooms, tmp_path):
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, [*command, "--format", "html"])
    assert done.exit_code == 0, done.output
    page.write_text(done.stdout)
    found, console = opened(page, IN_BROWSER, 400)
    assert not console
    assert found["width"] <= 0
    if zooms:
        _assert_zooms(found["domains"])


def _assert_zooms(domains: list[list[float]]) -> None:
    whole, closer, back, again = domains
    assert whole[0] < closer[0] < closer[1] < whole[1]
    assert back == pytest.approx(whole, abs=1e-6 * whole[1]) and again == whole
    assert all(low < high for low, high in pairwise(whole))
