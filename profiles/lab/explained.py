"""Differences between prediction, in-process counters and CUPTI that are known, each with its reason.

A difference that no row explains makes ``verify`` fail. A row says where it applies by fields that are compared as they
stand; None fits everything. ``missing`` names the sources that may have less than the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Source = Literal["predicted", "announced", "recorded"]


@dataclass(frozen=True, slots=True)
class SourceDifference:
    """One line or counter that the sources disagree about; None from a source that does not count such things."""

    kind: str  # of step
    stream: str
    what: str  # its first word is the direction, sync call or counter
    category: str  # of the range: schedule, forward, copy; "" for counters per step
    predicted: float | None
    announced: float | None
    recorded: float | None

    def of(self, source: Source) -> float | None:
        value: float | None = getattr(self, source)
        return value


@dataclass(frozen=True, slots=True)
class Explanation:
    name: str
    reason: str
    what: str
    missing: frozenset[Source]
    category: str | None = None

    def covers(self, difference: SourceDifference) -> bool:
        """Whether this is such a difference: of that kind, and with the sources that may have less having it."""
        if difference.what.partition(" ")[0] != self.what:
            return False
        if self.category is not None and difference.category != self.category:
            return False
        told = {name: difference.of(name) for name in ("predicted", "announced", "recorded")}
        counts = {value for value in told.values() if value is not None}
        most = max(counts)
        return len(counts) > 1 and all(
            value in (None, most) or name in self.missing for name, value in told.items()
        )


EXPLANATIONS: Final[Sequence[Explanation]] = (
    Explanation(
        "kernels of one op",
        "the virtual GPU counts an op once; on CUDA sampling, split decodes, a draft's candidates and the indexer's "
        "choice are two or three kernels, and an op without one of its own is torch's many",
        what="kernel",
        missing=frozenset(("predicted",)),
    ),
    Explanation(
        "copies inside a forward",
        "an op without a kernel of its own copies within the device as torch's stand-ins do; fused, it copies nothing",
        what="d2d",
        category="forward",
        missing=frozenset(("predicted",)),
    ),
)


def explanation(difference: SourceDifference) -> Explanation | None:
    return next((one for one in EXPLANATIONS if one.covers(difference)), None)
