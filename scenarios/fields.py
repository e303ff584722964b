"""The kinds of value a scenario is made of, and the lengths that its requests then have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetPydanticSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

T = TypeVar("T")

WORDS = {"on": True, "yes": True, "off": False, "no": False}


class Section(BaseModel):
    """A mapping of a YAML file: immutable, no unknown keys, no conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _switch(value: Any) -> Any:
    return WORDS.get(value.lower(), value) if isinstance(value, str) else value


def _also(form: JsonSchemaValue) -> GetPydanticSchema:
    """Lets the JSON Schema of a value have another form beside the value's own."""
    return GetPydanticSchema(None, lambda core, handler: {"anyOf": [form, handler(core)]})


def bare(key: str, kind: type = str, **others: str) -> GetPydanticSchema:
    """Reads a bare value of that ``kind`` as the section that has it under ``key``, and ``others`` besides."""

    name, words = ("string", "a text") if kind is str else ("integer", "an integer")

    def section(value: Any) -> Any:
        if not isinstance(value, kind | dict | BaseModel):
            raise PydanticCustomError("bare", "expected {bare} or a mapping", {"bare": words})
        return {**others, key: value} if isinstance(value, kind) else value

    return GetPydanticSchema(
        lambda source, handler: core_schema.no_info_before_validator_function(section, handler(source)),
        _also({"type": name}).get_pydantic_json_schema,
    )


Switch = Annotated[bool, BeforeValidator(_switch), _also({"enum": list(WORDS)})]
Setting = Annotated[bool | int | float | str, BeforeValidator(_switch)]
Count = Annotated[int, Field(ge=0, le=2**40)]
Positive = Annotated[int, Field(ge=1, le=2**40)]
Ranks = Annotated[int, Field(ge=1, le=256)]  # each is a thread, or a process, with a device of its own
Requests = Annotated[int, Field(ge=0, le=10_000_000)]  # each is drawn before the first one runs
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(ge=1e-3, le=1e9)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Limit = Annotated[
    Positive | None,
    BeforeValidator(lambda value: None if value == "none" else value),
    _also({"const": "none"}),
]
Several: TypeAlias = Annotated[tuple[T, ...], Field(strict=False)]  # lists, as YAML has them, are no tuples


Tokens = Annotated[float, Field(ge=0, le=1e150)]


@dataclass(frozen=True, slots=True)
class Summary:
    """Of token counts."""

    mean: Tokens
    p50: Tokens
    p95: Tokens


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts or outputs, in tokens. ``requested`` is that of the distribution; None for a trace."""

    requested: Summary | None
    achieved: Summary


@dataclass(frozen=True, slots=True)
class Achieved:
    """The lengths that were drawn, or found in a trace, before the run; also of a run that was interrupted.
    ``clipped`` requests were shortened so that prompt and output fit the model's context; ``left_out`` records of a
    trace, among those that were read, have no prompt or no output."""

    requests: Count
    prompt_tokens: Lengths
    output_tokens: Lengths
    clipped: Count
    left_out: Count = 0
