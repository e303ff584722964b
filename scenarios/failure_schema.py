"""The ``faults`` section: what breaks in the middle of a run, by script. Of a rank or of a link, one entry each."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator

from .fields import Positive, Rate, Section, Several

# Words of one kind of entry, and of the other.
OF_RANKS: Final = ("rank", "dies")
OF_LINKS: Final = ("link", "tag", "does", "nth", "ms")

Effect = Literal["stall", "drop", "delay", "repeat", "reorder"]


class Dies(Section):
    """Killed as it enters a phase for the ``nth`` time, or sends or has taken the message that the phase is about."""

    phase: str
    nth: Positive = 1


def _phase(value: Any) -> Any:
    return {"phase": value} if isinstance(value, str) else value


class Failure(Section):
    """``rank`` and ``dies``, or ``link`` (from, to), ``tag`` and ``does``. Counted per link and tag: ``stall`` holds
    the nth message and all behind it up for ``ms``, or for ever; ``drop`` loses the nth; ``delay`` brings it, and what
    is behind it, ``ms`` later; ``reorder`` brings it as late, and lets the others pass; ``repeat`` brings it twice."""

    rank: str | None = None
    dies: Annotated[Dies | None, BeforeValidator(_phase)] = None
    link: Several[str] = ()
    tag: str | None = None
    does: Effect | None = None
    nth: Positive = 1
    ms: Rate | None = None
