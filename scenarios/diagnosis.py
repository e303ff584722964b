"""Turns the errors of the validator into messages about the file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .problems import KeyPath, Problem, ScenarioSource, either, meant, show, unknown

MISSING = "required, but not given"
_WANTED = {
    "int_type": ("an integer",),
    "float_type": ("a number",),
    "string_type": ("a text",),
    "bool_type": ("true", "false"),
    "finite_number": ("a finite number",),
    "tuple_type": ("a list",),
    "bare": ("{bare}", "a mapping"),
    "dict_type": ("a mapping",),
    "model_type": ("a mapping",),
    "greater_than": ("more than {gt}",),
    "greater_than_equal": ("at least {ge}",),
    "less_than": ("less than {lt}",),
    "less_than_equal": ("at most {le}",),
}


class _Complaint(NamedTuple):
    path: KeyPath
    wanted: Sequence[str]  # the allowed values; empty: ``text`` is the whole message
    text: str
    value: object = None


def diagnose(
    error: ValidationError, *, root: type[BaseModel], source: ScenarioSource
) -> dict[KeyPath, Problem]:
    """One problem for each path that is wrong."""
    grouped: dict[KeyPath, list[_Complaint]] = {}
    for details in error.errors(include_url=False):
        complaint = _complaint(details, root=root, source=source)
        grouped.setdefault(complaint.path, []).append(complaint)
    # A mapping that is invalid inside matches one branch of a union; errors of the other branches are left out.
    around = {path[:depth] for path in grouped for depth in range(len(path))}
    return {
        path: source.problem(path, _message(complaints))
        for path, complaints in grouped.items()
        if path not in around or not all(isinstance(complaint.value, dict) for complaint in complaints)
    }


def _message(complaints: Sequence[_Complaint]) -> str:
    whole = [complaint.text for complaint in complaints if not complaint.wanted]
    if whole:
        return whole[0]
    wanted = dict.fromkeys(choice for complaint in complaints for choice in complaint.wanted)
    ending = max((complaint.text for complaint in complaints), key=len)
    return f"expected {either(list(wanted))}{ending}"


def _complaint(details: ErrorDetails, *, root: type[BaseModel], source: ScenarioSource) -> _Complaint:
    kind, loc, value = details["type"], details["loc"], details["input"]
    context: Mapping[str, Any] = details.get("ctx", {})
    path = _written(loc, source)
    if kind == "missing":
        return _Complaint((*path, loc[-1]), (), MISSING)
    if kind == "name":
        return _Complaint(path, (), context["message"])
    if kind == "union_tag_not_found":
        return _Complaint((*path, context["discriminator"].strip("'")), (), MISSING)
    if kind == "extra_forbidden":
        tags = (_tagged(model, loc[-2]) for model in sections(loc[:-1], root) if len(loc) > 1)
        branch = "".join(f" where {name} is {loc[-2]}" for name in tags if name)
        return _Complaint(path, (), unknown(f"key{branch}", str(loc[-1]), _siblings(loc, root)))
    if loc[-1:] == ("[key]",):
        return _Complaint(path, (), unknown("key", str(loc[-2]), _choices(context["expected"])))
    if kind == "literal_error" and value == loc[-1] and value not in (known := _siblings(loc, root)):
        return _Complaint(path, (), unknown("key", str(value), [*_choices(context["expected"]), *known]))
    if kind == "union_tag_invalid":
        named = (*path, context["discriminator"].strip("'"))
        path = named if named in source.places else path
        value, context = context["tag"], {"expected": context["expected_tags"]}
    choices = _choices(context.get("expected", ""))
    wanted = choices or [text.format_map(_whole(context)) for text in _WANTED.get(kind, (kind,))]
    return _Complaint(path, wanted, f", got {show(value)}{meant(value, choices)}", value)


def _whole(context: Mapping[str, Any]) -> dict[str, object]:
    return {key: int(x) if isinstance(x, float) and x.is_integer() else x for key, x in context.items()}


def _choices(expected: str) -> list[str]:
    return re.findall(r"'([^']*)'", expected)


def _written(loc: Sequence[str | int], source: ScenarioSource) -> KeyPath:
    """The parts of ``loc`` that are in the file; the validator also names union branches."""
    path: KeyPath = ()
    for part in loc:
        if (*path, part) in source.places:
            path = (*path, part)
    return path


def _siblings(loc: Sequence[str | int], root: type[BaseModel]) -> list[str]:
    """The keys of the section around ``loc``."""
    models = sections(loc[:-1], root)
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def sections(loc: Sequence[str | int], root: type[BaseModel]) -> list[type[BaseModel]]:
    """The models that are possible at a location; several where no tag selects one of a union."""
    models = [root]
    for part in loc:
        models = _step(models, part)
    return models


def _step(models: list[type[BaseModel]], part: str | int) -> list[type[BaseModel]]:
    """The models one part of a location deeper: those of a field, or the branch of a union with that tag."""
    fields = [model.model_fields[str(part)] for model in models if part in model.model_fields]
    if fields:
        return [model for field in fields for model in models_in(field.annotation)]
    return [model for model in models if _tagged(model, part)] or models


def _tagged(model: type[BaseModel], tag: str | int) -> str:
    """The field that selects the branch of a union by that tag; empty if none does."""
    return next((name for name, of in model.model_fields.items() if get_args(of.annotation) == (tag,)), "")


def walk(
    model: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[BaseModel], str]]:
    """The path, section and name of every key; simple keys of a section first. ``KIND`` stands for the keys of a
    mapping."""
    inner = {name: models_in(field.annotation) for name, field in model.model_fields.items()}
    for name in sorted(inner, key=lambda name: bool(inner[name])):
        yield (*path, name), model, name
        between = ("KIND",) if get_origin(model.model_fields[name].annotation) is dict else ()
        for section in inner[name]:
            yield from walk(section, (*path, name, *between))


def models_in(annotation: object) -> list[type[BaseModel]]:
    """The sections that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]
