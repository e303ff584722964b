"""The kinds of value a scenario is made of."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")

_WORDS = {"on": True, "yes": True, "off": False, "no": False}


class Section(BaseModel):
    """A mapping of the file: immutable, no unknown keys, no conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _switch(value: Any) -> Any:
    return _WORDS.get(value.lower(), value) if isinstance(value, str) else value


def _absent(value: Any) -> Any:
    return None if value == "none" else value


def _sequence(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def bare(key: str, kind: type = str, **others: str) -> BeforeValidator:
    """Reads a bare value of that kind as the section that has it under ``key``, and ``others`` besides."""
    return BeforeValidator(lambda value: {**others, key: value} if isinstance(value, kind) else value)


Switch = Annotated[bool, BeforeValidator(_switch)]
Setting = Annotated[bool | int | float | str, BeforeValidator(_switch)]
Count = Annotated[int, Field(ge=0, le=2**40)]
Positive = Annotated[int, Field(ge=1, le=2**40)]
Ranks = Annotated[int, Field(ge=1, le=256)]  # each is a thread, or a process, with a device of its own
Requests = Annotated[int, Field(ge=0, le=10_000_000)]  # each is drawn before the first one runs
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(ge=1e-3, le=1e9)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Limit = Annotated[Positive | None, BeforeValidator(_absent)]
Several: TypeAlias = Annotated[tuple[T, ...], BeforeValidator(_sequence)]
