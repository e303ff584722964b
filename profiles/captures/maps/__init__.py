"""Maps define what an engine's ranges mean: their categories, and which of them make a step.

A map is a YAML file of this folder or of the user's. It is independent of the tool that recorded the ranges.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from ....scenarios.fields import Section, Several
from ....scenarios.yaml_files import YamlFiles


class MapError(ValueError):
    """A map that does not exist, or that is not valid."""


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


# A regular expression for the whole name of a range.
Pattern = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_pattern)]
Name = Annotated[str, Field(min_length=1, max_length=60)]


class RangeRule(Section):
    """The meaning of some ranges. ``of`` is the step that they belong to: the next to be launched, the last launched
    (``own``), the one that is being settled, or none."""

    match: Pattern
    name: Name
    category: Literal["schedule", "forward", "copy", "idle"]
    of: Literal["next", "own", "settled", "none"] = "own"


class StepRule(Section):
    """Each range or mark that matches ``launch`` is a step. Its number is the range's ``payload``, which the step's
    other ranges have too, or follows from the ``order`` of launches. A range that matches ``settle`` settles the
    ``oldest`` step that was launched and not settled; with ``previous``, the first such range settles a step from
    before the capture, which begins in the middle of an overlapped loop. Ranges that match ``loop`` begin a round of
    the loop. A round without launch and settle had no work."""

    launch: Pattern
    number: Literal["order", "payload"] = "order"
    settle: Pattern | None = None
    settles: Literal["oldest", "previous"] = "oldest"
    loop: Pattern | None = None


class KindRule(Section):
    """Steps are of the first kind of which a range inside them, or the launch itself, matches. ``size``: where its
    name has the batch size."""

    match: Pattern
    kind: Name
    payload: Several[int] | None = None
    size: Pattern | None = None


class StreamRule(Section):
    """``forward``: forward operations are those on this stream only; a number or a name of the capture's, or the stream
    that is ``busiest`` with kernels inside forward ranges. Without one, they are all that forward ranges launched."""

    forward: int | str | None = None
    schedule: int | str | None = None


class RangeMap(Section):
    name: Name
    about: str = Field(max_length=2000)
    domain: str | None = Field(default=None, max_length=200)  # of NVTX, ``default`` for none; any without one
    steps: StepRule
    ranges: tuple[RangeRule, ...] = Field(strict=False, min_length=1, max_length=200)
    kinds: tuple[KindRule, ...] = Field(default=(), strict=False, max_length=200)
    streams: StreamRule = StreamRule()

    @property
    def tells_idle(self) -> bool:
        """Whether the map has ranges for time without work."""
        return self.steps.loop is not None or any(rule.category == "idle" for rule in self.ranges)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


FILES: Final = YamlFiles(__package__, "map", RangeMap, MapError)
names = FILES.names


def load(name_or_path: str) -> RangeMap:
    """A map of the package, or of a file. Raises MapError with all that is wrong with it."""
    return FILES.parse(FILES.content(name_or_path), name_or_path)
