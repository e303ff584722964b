"""``schedbench init`` and ``schema``: a commented scenario to begin with, and the keys of all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from .arguments import Overrides
from .errors import UsageError
from .text import echo

if TYPE_CHECKING:
    from ..scenarios.describe import KeyFact

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
    from ..scenarios.loader import loads
    from ..scenarios.overrides import expand

    if file.exists() and not force:
        raise UsageError(f"{file}: exists; --force replaces it")
    if not file.parent.is_dir():
        raise UsageError(f"{file.parent}: no such folder")
    facts = {".".join(fact.path): fact for fact in keys()}
    values = dict(_BEGIN)
    for text in overrides:
        key, _, value = text.partition("=")
        values[expand(key.strip())] = value.strip()
    if not overrides and sys.stdin.isatty():
        values = {key: _asked(facts[key], value) for key, value in values.items()}
    content = scenario_text(file.stem, values, facts).replace("SCHEMA", SCHEMA_FILE)
    loads(content.encode(), file=str(file), folder=file.parent, overrides=overrides)
    write_whole(file.parent / SCHEMA_FILE, json.dumps(json_schema(), indent=1) + "\n")
    write_whole(file, content)
    echo(f"{file}, and for editors {file.parent / SCHEMA_FILE}; now `schedbench run {file}`")


def _asked(fact: KeyFact, value: str) -> str:
    echo(f"{fact.about} ({fact.values})", err=True)
    answer: str = typer.prompt(".".join(fact.path), default=value, err=True)
    return answer


def scenario_text(name: str, values: dict[str, str], facts: dict[str, KeyFact]) -> str:
    """The file: a line for each key, with what it means. Keys of a section stand together."""
    lines = [f"name: {json.dumps(name, ensure_ascii=False)}", *_lines(values, "", facts)]
    return "\n".join(lines) + "\n" + _ENDING


def _lines(values: dict[str, str], section: str, facts: dict[str, KeyFact]) -> list[str]:
    lines: list[str] = []
    indent = "  " * section.count(".")
    for name in dict.fromkeys(
        key.removeprefix(section).partition(".")[0] for key in values if key.startswith(section)
    ):
        key = f"{section}{name}"
        fact, inner = facts.get(key), key not in values
        written = f"{indent}{name}:" if inner else f"{indent}{name}: {values[key]}"
        about = fact.about if fact and inner else f"{fact.about} ({fact.values})" if fact else ""
        lines.append(f"{written:42}  # {about}" if about else written)
        lines += _lines(values, f"{key}.", facts) if inner else []
    return lines


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
