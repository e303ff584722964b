"""``schedbench init`` and ``schema``: a commented scenario to begin with, and the keys of all."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from .arguments import Overrides
from .errors import UsageError
from .text import echo

if TYPE_CHECKING:
    from ..scenarios.describe import KeyFact
    from ..scenarios.document import Value

# The keys of a first scenario, which a terminal is prompted for: a shape that takes a laptop some seconds.
_BEGIN: Final = {
    "model.preset": "llama-3-8b",
    "device.hardware": "h200",
    "device.values": "none",
    "engine.overlap": "true",
    "engine.relay": "latest",
    "engine.chunked_prefill_size": "2048",
    "engine.max_running_requests": "32",
    "workload.requests": "32",
    "workload.arrival.process": "poisson",
    "workload.arrival.rate": "20",
    "workload.prompt_tokens": "512",
    "workload.output_tokens": "64",
}
_ENDING: Final = """\
# A budget on the worst step of a kind; a run that breaks it exits with 1.
# expect:
#   decode.steady: {schedule: {h2d: 0, d2h: 0, sync: 0}}
# yaml-language-server: $schema=SCHEMA
"""


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The scenario to write.")],
    overrides: Overrides = (),
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:
    """Write a commented scenario, and the schema that editors check it with. Without --set, a terminal is asked for the
    values.

    Exit codes: 0 done; 2 the file exists, or a value that no scenario can have.
    """
    from ..profiles.record.files import write_whole
    from ..scenarios.describe import SCHEMA_FILE, json_schema, keys
    from ..scenarios.document import Document
    from ..scenarios.loader import loads
    from ..scenarios.overrides import override

    if file.exists() and not force:
        raise UsageError(f"{file}: exists; --force replaces it")
    if not file.parent.is_dir():
        raise UsageError(f"{file.parent}: no such folder")
    facts = {fact.path: fact for fact in keys()}
    given = [*overrides]
    if not overrides and sys.stdin.isatty():
        given = [f"{key}={_asked(facts[*key.split('.')], value)}" for key, value in _BEGIN.items()]
    document = Document({"name": file.stem}, {})
    for text in (*(f"{key}={value}" for key, value in _BEGIN.items()), *given):
        override(document, text)
    assert isinstance(document.data, dict)
    content = scenario_text(document.data, facts).replace("SCHEMA", SCHEMA_FILE)
    for also in (given, ()):  # the overrides again, since a problem of theirs is named as one
        loads(content.encode(), file=str(file), folder=file.parent, overrides=also)
    write_whole(file.parent / SCHEMA_FILE, json.dumps(json_schema(), indent=1) + "\n")
    write_whole(file, content)
    echo(f"{file}, and for editors {file.parent / SCHEMA_FILE}; now `schedbench run {file}`")


def _asked(fact: KeyFact, value: str) -> str:
    echo(f"{fact.about} ({fact.values})", err=True)
    answer: str = typer.prompt(".".join(fact.path), default=value, err=True)
    return answer


def scenario_text(values: Mapping[str, Value], facts: Mapping[tuple[str, ...], KeyFact]) -> str:
    """The file: a line for each key, with what it means."""
    return "\n".join(_lines(values, (), facts)) + "\n" + _ENDING


def _lines(
    values: Mapping[str, Value], section: tuple[str, ...], facts: Mapping[tuple[str, ...], KeyFact]
) -> Iterator[str]:
    for name, value in values.items():
        fact, inner = facts.get((*section, name)), value if isinstance(value, dict) else {}
        written = f"{'  ' * len(section)}{name}:" + ("" if inner else f" {_yaml(value)}")
        about = "" if fact is None else fact.about if inner else f"{fact.about} ({fact.values})"
        yield f"{written:42}  # {about}" if about else written
        yield from _lines(inner, (*section, name), facts)


def _yaml(value: Value) -> str:
    """The value in one line: as JSON, which is YAML, but for a text that needs no quotes."""
    import yaml

    plain = (
        isinstance(value, str)
        and re.fullmatch(r"[a-zA-Z/][\w./-]*", value)
        and yaml.safe_load(value) == value
    )
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def schema(
    form: Annotated[
        Literal["json", "md"],
        typer.Option("--format", help="JSON Schema for editors, or the page of the docs."),
    ] = "json",
) -> None:
    """Print the keys of a scenario file: as a JSON Schema, which editors complete and check files with, or as a
    table with what each key means."""
    from ..scenarios.describe import json_schema, page

    echo(json.dumps(json_schema(), indent=1) if form == "json" else page().rstrip("\n"))
