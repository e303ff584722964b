"""Control characters in names reach neither a terminal nor a pipe."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.table import Table
from rich.text import Text

from schedbench.cli.console import PrintableConsole
from schedbench.cli.page import Format, framed
from schedbench.scenarios.schema import Stream
from schedbench.sched.observe import StreamName
from tests.conftest import RunCommand

HOSTILE = "a\x1b]0;title\x07\x1b[31m\x9b2J\x7f"
CONTROLS = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))} - set("\t\n")
BRIEF = ("--set", "workload.requests=2", "--set", "workload.output_tokens=4")
NAMED = (*BRIEF, "--set", f"name={json.dumps(HOSTILE)}")


@pytest.mark.parametrize("form", get_args(Format))
def test_the_name_of_a_scenario_is_printed_without_its_escapes(run_command: RunCommand, form: str) -> None:
    done = run_command("run", "overlap_on", *NAMED, "--format", form)
    assert done.code == 0, done.err
    assert not CONTROLS & set(done.out + done.err)
    assert done.out.endswith("\n") and not done.out.endswith("\n\n\n")
    if form == "json":
        assert json.loads(done.out)["scenario"]["expanded"]["name"] == HOSTILE


def test_messages_are_printed_without_escapes(run_command: RunCommand, tmp_path: Path) -> None:
    done = run_command("run", str(tmp_path / "a\x1b[31m.yaml"))
    assert done.code == 2 and not CONTROLS & set(done.out + done.err)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_console_writes_only_its_own_escapes(terminal: bool) -> None:
    file = io.StringIO()
    console = PrintableConsole(
        file=file, force_terminal=terminal, color_system="truecolor" if terminal else None, width=80
    )
    table: Any = Table("heading\x1b[1m")
    table.add_row(Text(HOSTILE, style="green"))
    console.print(table)
    console.print(HOSTILE, markup=False)
    written = file.getvalue()
    assert "␛[31m" in written and "\x1b[31m" not in written and "\x07" not in written
    assert ("\x1b" in written) == terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_no_line_ends_in_spaces(terminal: bool) -> None:
    file = io.StringIO()
    console = PrintableConsole(file=file, force_terminal=terminal, color_system=None, width=20)
    table = framed("title", "column", "wider column")
    table.add_row(Text("a", style="green"), "b\nc")
    console.print(Text("a text that is folded; at its spaces", style="bold"), table, "end  ", sep="\n")
    lines = [line.rstrip() for line in file.getvalue().split("\n")]
    assert file.getvalue() == "\n".join(lines)
    assert lines[:2] == ["a text that is", "folded; at its"] and lines[-3:] == ["         c", "end", ""]


def test_every_stream_with_a_name_can_have_a_budget(run_command: RunCommand) -> None:
    assert set(get_args(StreamName)) < set(get_args(Stream))
    done = run_command("run", "overlap_on", *BRIEF, "--expect", "decode.lengths.d2h=0")
    assert done.code == 0, done.err
