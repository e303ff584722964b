"""Every command line in README.md and docs/ is accepted by the program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from schedbench.cli.app import app

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^    (?:\$ )?schedbench (.*)$|`schedbench ([^`]+)`", re.MULTILINE)
NO_COMMAND = re.compile(
    r"\.\.\.|…|──|[|\[\]]|^\w+$|\\$"
)  # a pattern, a diagram, the name of a command, a part of a line


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
