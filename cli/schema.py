"""``schedbench schema``: the keys of a scenario, as a JSON Schema or as a page."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from .text import echo


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
