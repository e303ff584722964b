"""The ``faults`` section: scripted failures in the middle of a run, one entry for each rank or link."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator

from .fields import Positive, Rate, Section, Several

# The keys of an entry for a rank, and for a link.
OF_RANKS: Final = ("rank", "dies")
OF_LINKS: Final = ("link", "tag", "does", "nth", "ms")

Effect = Literal["stall", "drop", "delay", "repeat", "reorder"]


class Dies(Section):
    """The rank is killed when it enters a phase for the ``nth`` time, or when it sends or has received its message."""

    phase: str
    nth: Positive = 1


def _phase(value: Any) -> Any:
    return {"phase": value} if isinstance(value, str) else value


class Failure(Section):
    """``rank`` and ``dies``, or ``link`` (from, to), ``tag`` and ``does``. Messages are counted per link and
    tag: ``stall`` holds the nth message and all later ones for ``ms``, or for ever; ``drop`` loses the nth; ``delay``
    delivers it and all later ones ``ms`` later; ``reorder`` delays it and lets the others pass; ``repeat`` delivers it
    twice."""

    rank: str | None = None
    dies: Annotated[Dies | None, BeforeValidator(_phase)] = None
    link: Several[str] = ()
    tag: str | None = None
    does: Effect | None = None
    nth: Positive = 1
    ms: Rate | None = None
