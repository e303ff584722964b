"""The output that README.md and docs/ show below a command is what the command prints.

A fenced block of the language ``console`` has commands behind ``$ ``, each followed by its output at 80 columns. A line
``...`` stands for any number of lines. Spaces, line breaks and numbers of source lines (``.py:70``) are not compared.

Of the commands that run ``sglang:../sglang``, whose clone is given by path (``test_sglang.py``), ``my-branch`` has the
change that the page describes.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import RunCommand
from tests.profiles.engines.checkouts import git
from tests.profiles.engines.conftest import PYTHON
from tests.profiles.engines.test_sglang import CLONE, LATER

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CONSOLE: Final = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.DOTALL | re.MULTILINE)
SHOWN: Final = re.compile(r"^\$ schedbench (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
BATCH: Final = "python/sglang/srt/managers/schedule_batch.py"
SUM: Final = "self.seq_lens_sum = self.seq_lens.sum().item()"
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
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("COLUMNS", "80")
    interpreter: tuple[str, ...] = ()
    if "sglang:../sglang" in line:
        if not CLONE:
            pytest.skip("SCHEDBENCH_SGLANG names no clone of SGLang")
        make_branch(tmp_path / "sglang")
        interpreter = ("--engine-python", PYTHON)
    assert missing(shown, run_command(*shlex.split(line), *interpreter).out) is None


def make_branch(clone: Path) -> None:
    """Clone SGLang, with a commit of July 2026 as ``main`` and the change of docs/first-change.md as ``my-branch``."""
    git(clone.parent, "clone", "-q", "--shared", "--bare", CLONE, str(clone))
    git(clone, "update-ref", "refs/heads/main", LATER)
    before, method, rest = git(clone, "show", f"main:{BATCH}").partition("def prepare_for_decode(")
    assert SUM in (ROOT / "docs/first-change.md").read_text()
    kept = f"{SUM.partition(' = ')[0]} = None"
    (clone / "changed.py").write_text(f"{before}{method}{rest.replace(kept, SUM, 1)}")
    blob = git(clone, "hash-object", "-w", "changed.py")
    git(clone, "read-tree", "main")
    git(clone, "update-index", "--cacheinfo", f"100644,{blob},{BATCH}")
    commit = git(clone, "commit-tree", "-p", "main", "-m", "sum", git(clone, "write-tree"))
    git(clone, "update-ref", "refs/heads/my-branch", commit)


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
