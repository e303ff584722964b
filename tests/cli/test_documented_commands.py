"""Every command line in README.md and docs/ is accepted by the program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml

from schedbench.cli.app import app
from schedbench.cli.errors import GATE_FAILED, WORKLOAD_FAILED
from tests.conftest import RunCommand

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / "docs").glob("*.yml"))
COMMAND = re.compile(r"^(?:    (?:\$ )?|\$ )schedbench (.*)$|`schedbench ([^`]+)`", re.MULTILINE)
NO_COMMAND = re.compile(
    r"\.\.\.|…|──|\||\s\[|^\w+$"
)  # a pattern, a diagram, the name of a command, a part of a line
# Reads what is shipped or kept; names in capitals stand for others, and captures are not shipped.
READS = re.compile(
    r"(list|explain|schema|init|report|trace|baseline) (?!.*(\b(NAME|KEY|DIR)\b|\.nsys-rep|\.sqlite))"
)

# Needs a device, another project's source, a commit, processes of torch.distributed, or a file that the reader has.
ELSEWHERE = re.compile(
    r"cuda|sglang|\.nsys|\.sqlite|git:|before/|distributed|FILE|my_relay|here\.yaml|A/result|\b(NAME|SCENARIO|STATE|DIR)\b"
)
# What keeps a command short.
SHORT = {
    "run": "--set requests=2",
    "compare": "--set requests=2 --seeds 1 --quick",
    "check": "--set requests=2 --quick",
    "sweep": "--set requests=2 --draws 0",
    "worth": "--set requests=2 --quick",
    "onebatch": "",
}


def scripts(page: Path) -> list[str]:
    """The lines of a GitHub workflow that call the program."""
    steps = [step for job in yaml.safe_load(page.read_text())["jobs"].values() for step in job["steps"]]
    lines = "\n".join(step.get("run", "") for step in steps).replace("\\\n", "").splitlines()
    return [
        line.strip().removeprefix("schedbench ") for line in lines if line.strip().startswith("schedbench ")
    ]


def documented() -> Iterator[tuple[str, str, str]]:
    """Pages, commands, and the comments behind them."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for found in COMMAND.finditer(re.sub(r" \\\n\s+", " ", page.read_text())):
            line, *comment = re.split(r"\s+[#>]", found[1] or found[2])
            if not NO_COMMAND.search(line):
                yield page.name, line.strip(), "".join(comment)
    for page in WORKFLOWS:
        for line in scripts(page):
            yield page.name, line.partition(" > ")[0], ""


@cache
def command_line() -> typer.core.TyperGroup:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return group


def test_every_documented_command_is_accepted() -> None:
    refused = {}
    for page, line, _ in sorted(set(documented())):
        try:
            parse(line)
        except Exception as error:
            refused[page, line] = error
    assert not refused


def parse(line: str) -> None:
    """Raises what the program raises for its arguments, without running the command."""
    context = command_line().make_context("schedbench", shlex.split(line), resilient_parsing=False)
    command = context.command
    name, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    assert inner is not None and name is not None
    if isinstance(inner, type(command)):
        assert rest[0] in inner.commands
        name, inner, rest = inner.resolve_command(context, rest)
    inner.make_context(name, list(rest), parent=context)


def test_the_docs_have_many_commands() -> None:
    assert len({(page, line) for page, line, _ in documented()}) > 60
    assert [len(scripts(page)) for page in WORKFLOWS] == [2, 3]


def test_every_command_is_on_the_page_of_commands() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    commands = vars(typer.main.get_command(app))["commands"]
    assert not [name for name in commands if f"schedbench {name}" not in page]


@pytest.mark.wide
def test_those_that_read_run(
    run_command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_command("run", "mixed", "--set", "requests=2", "--output-dir", "kept")
    lines = [line for line in dict.fromkeys(line for _, line, _ in documented()) if READS.match(line)]
    failed = {line: done.err for line in lines if (done := run_command(*shlex.split(line))).code}
    assert len(lines) > 15 and not failed


RUNS = sorted(
    {line for _, line, _ in documented() if line.split()[0] in SHORT and not ELSEWHERE.search(line)}
    - {line for _, line, comment in documented() if "minutes" in comment}
)


@pytest.mark.wide
@pytest.mark.parametrize("line", RUNS)
def test_a_command_that_runs_a_scenario_ends_as_documented_on_two_requests(
    line: str, run_command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_command(*shlex.split(line), *shlex.split(SHORT[line.split()[0]]))
    expected = {0, WORKLOAD_FAILED} if "dies:" in line else {GATE_FAILED if " --fault " in line else 0}
    assert done.code in expected, done.err
