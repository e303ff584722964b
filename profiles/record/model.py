"""What all parts of a result document are made of: immutable models, and numbers that a file can hold."""

from __future__ import annotations

from operator import not_
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(ge=-1e150, le=1e150)]  # can be squared
Instant = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # ns


class ResultModel(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def omitted(default: Any = None) -> Any:
    """A field that a document does not have where it is None, 0 or empty."""
    return Field(default=default, exclude_if=not_)
