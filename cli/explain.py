"""``schedbench explain``: print the definition of a metric, or the meaning of a word of the pages, a scenario key or a
reason code."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from contextlib import suppress
from typing import Annotated, Any

import typer

from .arguments import UndrawnForm
from .errors import UsageError
from .text import cut_right, echo

WIDTH = 80  # of prose where stdout is not a terminal


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A metric, a word of a page, a scenario key or a reason code; without one, all metrics."
        ),
    ] = None,
    form: UndrawnForm = "table",
) -> None:
    """Print how a metric is defined, or what a word of a page, a key of a scenario or a reason for no verdict means."""
    from ..profiles.record.definitions import DEFINITIONS, PAGE
    from .page import show_entries

    if name is not None:
        entry = _one(name)
        show_entries(form, name, [entry], _paragraphs(**entry))
    elif form == "md":
        echo(PAGE.rstrip())
    else:
        show_entries(form, "metrics", [entry._asdict() for entry in DEFINITIONS.values()], _all())


def _all() -> str:
    from ..profiles.record.definitions import DEFINITIONS

    entries = DEFINITIONS.values()
    names, units = (max(len(getattr(entry, field)) for entry in entries) for field in ("name", "unit"))
    lines = [f"{e.name:{names}}  {e.unit:{units}}  {e.about}" for e in entries]
    width = _width()
    return "\n".join(lines if width is None else (cut_right(line, width) for line in lines))


def _width() -> int | None:
    """The width of the terminal, or COLUMNS. None for a pipe, for which no line is cut."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return None


def _one(word: str) -> dict[str, Any]:
    """What is known of the word, its name first. Raises UsageError for a word that has no meaning."""
    from ..profiles.judge.reasons import ABOUT
    from ..profiles.record.definitions import DEFINITIONS, KINDS, TERMS, definition, full_name
    from ..scenarios.describe import keys
    from ..scenarios.overrides import expand
    from ..scenarios.problems import ScenarioError, meant

    if word in ABOUT:
        return {"name": word, "about": ABOUT[word]}
    if (term := "step kind" if word in KINDS else word.lower().replace("_", " ")) in TERMS:
        return {"name": term, "about": TERMS[term]}
    facts = {".".join(fact.path): fact for fact in keys()}
    key = ""
    with suppress(ScenarioError):  # the word shortens no key
        key = expand(word)
    if word not in DEFINITIONS and key in facts:
        fact = facts[key]
        default = fact.default or "none, it has to be given"
        return {"name": key, "about": fact.about, "values": fact.values, "default": default}
    try:
        return {**definition(full_name(word))._asdict(), "name": full_name(word)}
    except KeyError:
        near = meant(word, [*DEFINITIONS, *TERMS, *facts, *(fact.path[-1] for fact in facts.values())])
        listed = near or "; `schedbench explain` lists them"
        raise UsageError(f"no metric and no scenario key '{word}'{listed}") from None


def _paragraphs(name: str, about: str, **details: Any) -> str:
    """The name, what it means, and labelled details, in lines as wide as the terminal."""
    width, better = _width() or WIDTH, {"higher": "higher is", "lower": "lower is", "none": "neither is"}
    measured = f"  [{details['unit']}, {better[details['direction']]} better]" if "unit" in details else ""
    lines = [
        textwrap.fill(details[label], width, initial_indent=f"{label:9}", subsequent_indent=" " * 9)
        for label in ("values", "default", "formula", "source")
        if label in details
    ]
    return "\n\n".join(filter(None, (f"{name}{measured}", textwrap.fill(about, width), "\n".join(lines))))
