"""Every command line in README.md and docs/ is accepted by the program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from schedbench.cli.app import app
from tests.conftest import RunCommand

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^(?:    (?:\$ )?|\$ )schedbench (.*)$|`schedbench ([^`]+)`", re.MULTILINE)
NO_COMMAND = re.compile(
    r"\.\.\.|…|──|[|\[\]]|^\w+$|\\$"
)  # a pattern, a diagram, the name of a command, a part of a line
# Reads what is shipped or kept; names in capitals stand for others, and captures are not shipped.
READS = re.compile(
    r"(list|explain|schema|init|report|trace|baseline) (?!.*(\b(NAME|KEY|DIR)\b|\.nsys-rep|\.sqlite))"
)


def documented() -> Iterator[tuple[str, str]]:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for found in COMMAND.finditer(page.read_text()):
            line = re.split(r"\s+[#>]", found[1] or found[2])[0].strip()
            if not NO_COMMAND.search(line):
                yield page.name, line


@pytest.mark.parametrize(("page", "line"), sorted(set(documented())))
def test_a_documented_command_is_accepted(page: str, line: str) -> None:  # noqa: ARG001
    context = typer.main.get_command(app).make_context(
        "schedbench", shlex.split(line), resilient_parsing=False
    )
    command = context.command
    name, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    assert inner is not None and name is not None
    if isinstance(inner, type(command)):
        assert rest[0] in inner.commands
        name, inner, rest = inner.resolve_command(context, rest)
    inner.make_context(name, list(rest), parent=context)


def test_the_docs_have_many_commands() -> None:
    assert len(set(documented())) > 60


def test_those_that_read_run(
    run_command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_command("run", "mixed", "--set", "requests=2", "--output-dir", "kept")
    lines = [line for line in dict.fromkeys(line for _, line in documented()) if READS.match(line)]
    failed = {line: done.err for line in lines if (done := run_command(*shlex.split(line))).code}
    assert len(lines) > 15 and not failed
