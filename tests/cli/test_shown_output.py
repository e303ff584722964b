"""The output that README.md and docs/ show below a command is what the command prints.

A fenced block of the language ``console`` has commands behind ``$ ``, each followed by its output at 80 columns. A line
``...`` stands for any number of lines. Spaces, line breaks and numbers of source lines (``.py:70``) are not compared.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import RunCommand

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CONSOLE: Final = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.DOTALL | re.MULTILINE)
SHOWN: Final = re.compile(r"^\$ schedbench (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
FOUND: Final = [
    (page.name, line, shown)
    for page in PAGES
    for block in CONSOLE.findall(page.read_text())
    for line, shown in SHOWN.findall(block)
]


def missing(shown: str, out: str) -> str | None:
    """The first part of what is shown, between two elisions, that the output does not have in its place."""
    pattern, text = "", comparable(out)
    for number, part in enumerate(re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE)):
        pattern += (".*?" if number else "") + re.escape(comparable(part))
        if not re.match(pattern, text):
            return part
    return None if re.fullmatch(pattern, text) else "the output has more lines at its end"


def comparable(text: str) -> str:
    return re.sub(r"(?<=\.py):\d+|\s+", "", text)


@pytest.mark.wide
@pytest.mark.parametrize(("page", "line", "shown"), FOUND, ids=[f"{page} {line}" for page, line, _ in FOUND])
def test_a_command_prints_what_its_page_shows(
    page: str,  # noqa: ARG001
    line: str,
    shown: str,
    run_command: RunCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert missing(shown, run_command(*shlex.split(line)).out) is None


def test_pages_show_output() -> None:
    assert {"README.md", "tour.md"} <= {page for page, *_ in FOUND}


@pytest.mark.parametrize(
    ("shown", "lacks"),
    [
        ("a 1\nb  2\nc 3\n", None),
        ("a 1\n...\n", None),
        ("...\nb 2\n...\n", None),
        ("...\nc 4\n", "c 4\n"),
        ("c 3\n...\n", "c 3\n"),
        ("a 1\n", "the output has more lines at its end"),
    ],
)
def test_what_is_shown_is_compared_in_order(shown: str, lacks: str | None) -> None:
    assert missing(shown, "a 1\nb 2\nc 3\n") == lacks
