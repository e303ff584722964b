"""What all parts of a result document are made of: immutable models, and numbers that a file can hold."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(ge=-1e150, le=1e150)]  # can be squared
Instant = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # ns


class ResultModel(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
