"""``schedbench doctor``: check what this machine can run."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from .errors import UNABLE
from .scenario_arguments import Engine, EnginePython, EngineWheels, engine_choice
from .text import echo


def doctor(
    engine: Engine = None,
    engine_python: EnginePython = None,
    engine_wheels: EngineWheels = None,
    form: Annotated[Literal["table", "json"], typer.Option("--format", help="A table, or JSON.")] = "table",
) -> None:
    """Check what this machine can run, or whether it can run an engine of another project; exit code 3 if it can run
    nothing."""
    from ..profiles.lab.doctor import engine_checks, run_checks

    other = engine_choice(engine, engine_python, engine_wheels)
    checks = run_checks() if other is None else engine_checks(other)
    if form == "json":
        echo(json.dumps([check._asdict() for check in checks], indent=1))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            echo(f"{'ok' if check.ok else '–':2}  {check.name:{width}}  {check.detail}")
    if not any(check.ok for check in checks if check.runs):
        raise typer.Exit(UNABLE)
