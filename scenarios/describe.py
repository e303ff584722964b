"""What the keys of a scenario mean: as a JSON Schema, key by key, and as a page of the documentation."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from ..sched.relay.names import SWITCH_VALUES, SWITCHES
from . import schema, workload_schema
from .diagnosis import walk
from .fields import WORDS
from .schema import Scenario

SCHEMA_FILE: Final = "scenario.schema.json"
_MODULES: Final = (schema, workload_schema)
_BOUNDS: Final = {
    "minimum": "at least {:,.10g}",
    "exclusiveMinimum": "more than {:,.10g}",
    "maximum": "at most {:,.10g}",
    "exclusiveMaximum": "less than {:,.10g}",
}
_TAGS: Final = {  # the keys that decide which other keys a section has
    "process": "When requests arrive; the other keys of the section depend on it.",
    "dist": "How lengths are distributed; the other keys of the section depend on it.",
}
_HUGE: Final = 2**24  # a larger limit is there to catch mistakes only


class KeyFact(NamedTuple):
    """A key by its path. ``default`` is as in YAML, {} for a section; empty for one that has to be given. A key of
    several kinds of section has their default, and the kind in which it has to be given."""

    path: tuple[str, ...]
    values: str
    default: str
    about: str


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a scenario file, for editors."""
    found = Scenario.model_json_schema()
    for name, definition in ({Scenario.__name__: found} | found["$defs"]).items():
        for key, about in _docstrings().get(name, {}).items():
            definition["properties"][key]["description"] = about
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


@cache
def keys() -> Sequence[KeyFact]:
    """Every key, in the order of the schema. A key of several kinds of section is there once."""
    whole = Scenario.model_json_schema()
    definitions = {Scenario.__name__: whole} | whole["$defs"]
    found: dict[tuple[str, ...], KeyFact] = {}
    required: dict[tuple[str, ...], str] = {}
    for path, model, name in walk(Scenario):
        properties = definitions[model.__name__]["properties"]
        fact = KeyFact(
            path,
            _values(properties[name]),
            _default(model, name),
            _docstrings()[model.__name__].get(name) or _TAGS[name],
        )
        if known := found.get(path):
            needed = f"{fact.default}; has to be given in {required[path]}" if fact.default else ""
            values, default = _either([known.values, fact.values]), known.default or needed
            fact = known._replace(values=values, default=default)
        elif not fact.default:
            required[path] = model.__name__.lower()
        found[path] = fact
        if path == ("engine", "relay", "state"):
            for switch, about in SWITCHES.items():
                key = ("engine", "relay", switch)
                found[key] = KeyFact(key, " or ".join(SWITCH_VALUES[switch]), "the state's", about)
    return tuple(found.values())


def page() -> str:
    """docs/scenarios.md."""
    lines = [
        "# Keys of a scenario",
        "",
        "Written by `schedbench schema --format md`, which a test repeats. `schedbench explain KEY` prints one row,",
        "`schedbench schema` the JSON Schema, which editors use by the last line of a shipped file, and",
        "`schedbench init` a commented scenario to begin with. A key without a default has to be given where its",
        "section is given.",
    ]
    sections = dict.fromkeys(fact.path[0] if len(fact.path) > 1 else "" for fact in keys())
    for section in sections:
        lines += [
            "",
            f"## {section or 'The file'}",
            "",
            "| key | values | default | meaning |",
            "|---|---|---|---|",
        ]
        for fact in keys():
            if section == (fact.path[0] if len(fact.path) > 1 else ""):
                key, default = f"`{'.'.join(fact.path)}`", fact.default and f"`{fact.default}`"
                lines.append(f"| {key} | {fact.values} | {default} | {fact.about} |")
    return "\n".join(lines) + "\n"


@cache
def _docstrings() -> Mapping[str, Mapping[str, str]]:
    """By section and key, the text below the key in the source of the schema."""
    found: dict[str, dict[str, str]] = {}
    for module in _MODULES:
        classes = (
            node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)
        )
        for node in classes:
            texts = found[node.name] = {}
            for key, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(key, ast.AnnAssign) and isinstance(below, ast.Expr):
                    assert isinstance(key.target, ast.Name) and isinstance(below.value, ast.Constant)
                    texts[key.target.id] = " ".join(str(below.value.value).split())
    return found


def _values(part: Mapping[str, Any]) -> str:
    """The values that a part of the JSON Schema allows, in words."""
    if "const" in part:
        return str(part["const"])
    if "enum" in part:
        return "true or false" if part["enum"] == list(WORDS) else " or ".join(map(str, part["enum"]))
    if "anyOf" in part or "oneOf" in part:
        return _either(map(_values, part.get("anyOf", part.get("oneOf", ()))))
    if "$ref" in part:
        return "a section"
    kind = part.get("type")
    if kind == "array":
        return "a list"
    words = {"integer": "an integer", "number": "a number", "string": "a text", "boolean": "true or false"}
    bounds = [text.format(part[name]) for name, text in _BOUNDS.items() if part.get(name, _HUGE) < _HUGE]
    return ", ".join([words.get(str(kind), "null" if kind == "null" else "a section"), *bounds])


def _either(values: Iterable[str]) -> str:
    """Each alternative once, none and null behind the others."""
    several = dict.fromkeys(" or ".join(values).split(" or "))
    return " or ".join(sorted(several, key={"none", "null"}.__contains__))


def _default(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel | dict):
        return "{}"
    return value if isinstance(value, str) and value else json.dumps(value)
