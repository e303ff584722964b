"""The kinds of value a scenario is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

T = TypeVar("T")

WORDS = {"on": True, "yes": True, "off": False, "no": False}


class Section(BaseModel):
    """A mapping of the file: immutable, no unknown keys, no conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _switch(value: Any) -> Any:
    return WORDS.get(value.lower(), value) if isinstance(value, str) else value


def _absent(value: Any) -> Any:
    return None if value == "none" else value


def _sequence(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, eq=False)
class Also:
    """Lets the JSON Schema of a value have another form beside the value's own."""

    form: JsonSchemaValue

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [self.form, handler(core)]}


@dataclass(frozen=True, eq=False)
class Bare(Also):
    """Reads a bare value of that ``kind`` as the section that has it under ``key``, and ``others`` besides."""

    key: str
    kind: type
    others: Mapping[str, str]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._section, handler(source))

    def _section(self, value: Any) -> Any:
        return {**self.others, self.key: value} if isinstance(value, self.kind) else value


def bare(key: str, kind: type = str, **others: str) -> Bare:
    """Reads a bare value as a section; see Bare."""
    return Bare({"type": "string" if kind is str else "integer"}, key, kind, others)


Switch = Annotated[bool, BeforeValidator(_switch), Also({"enum": list(WORDS)})]
Setting = Annotated[bool | int | float | str, BeforeValidator(_switch)]
Count = Annotated[int, Field(ge=0, le=2**40)]
Positive = Annotated[int, Field(ge=1, le=2**40)]
Ranks = Annotated[int, Field(ge=1, le=256)]  # each is a thread, or a process, with a device of its own
Requests = Annotated[int, Field(ge=0, le=10_000_000)]  # each is drawn before the first one runs
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(ge=1e-3, le=1e9)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Limit = Annotated[Positive | None, BeforeValidator(_absent), Also({"const": "none"})]
Several: TypeAlias = Annotated[tuple[T, ...], BeforeValidator(_sequence)]
