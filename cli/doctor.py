"""``schedbench doctor``: check what this machine can run."""

from __future__ import annotations

import typer

from .arguments import Engine, EnginePython, EngineWheels, Form, engine_choice
from .errors import UNABLE


def doctor(
    engine: Engine = None,
    engine_python: EnginePython = None,
    engine_wheels: EngineWheels = None,
    form: Form = "table",
) -> None:
    """Check what this machine can run, or whether it can run an engine of another project; exit code 3 if it can run
    nothing."""
    from ..profiles.lab.doctor import engine_checks, run_checks
    from .page import show_entries

    other = engine_choice(engine, engine_python, engine_wheels)
    checks = run_checks() if other is None else engine_checks(other)
    width = max(len(check.name) for check in checks)
    lines = [f"{'ok' if check.ok else '–':2}  {check.name:{width}}  {check.detail}" for check in checks]
    show_entries(form, "this machine", [check._asdict() for check in checks], "\n".join(lines))
    if not any(check.ok for check in checks if check.runs):
        raise typer.Exit(UNABLE)
