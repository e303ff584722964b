"""``schedbench list``: what comes with the package."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from .numbers import number

Entry = dict[str, Any]
What = Literal["scenarios", "models", "hardware"]
Format = Literal["table", "json"]


def show(
    what: Annotated[What, typer.Argument(help="What to list.")],
    form: Annotated[Format, typer.Option("--format", help="A table, or a list of objects.")] = "table",
) -> None:
    """List the scenarios, models or hardware profiles that can be named."""
    entries = _SOURCES[what]()
    typer.echo(json.dumps(entries, indent=1, ensure_ascii=False) if form == "json" else _table(entries))


def _table(entries: list[Entry]) -> str:
    width = max((len(entry["name"]) for entry in entries), default=0)
    return "\n".join(f"{entry['name']:{width}}  {entry['about']}".rstrip() for entry in entries)


def _scenarios() -> list[Entry]:
    from ..scenarios import catalog

    return [dict(entry) for entry in catalog()]


def _models() -> list[Entry]:
    from ..sched.model.presets import PRESETS

    return [
        {
            "name": name,
            "about": f"{config.num_layers} layers, hidden {number(config.hidden_size)}, "
            f"vocabulary {number(config.vocab_size)}, {number(config.max_positions)} positions",
            "layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "max_positions": config.max_positions,
        }
        for name, config in PRESETS.items()
    ]


def _hardware() -> list[Entry]:
    from ..profiles import hardware

    profiles = (hardware.load(name) for name in hardware.names())
    return [{"name": profile.name, "about": profile.about, "sha256": profile.sha256} for profile in profiles]


_SOURCES: dict[What, Callable[[], list[Entry]]] = {
    "scenarios": _scenarios,
    "models": _models,
    "hardware": _hardware,
}
