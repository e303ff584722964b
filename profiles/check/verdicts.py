"""What a check says: whether it passed, and what a reader needs to act on if it did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...sched.relay.choice import RelayChoice
from ..record.result import Result, SitePart

Verdict = Literal["passed", "failed", "not applicable"]


class Evidence(NamedTuple):
    """One sentence, and the source lines that it is about, or the ``field`` of a batch or buffer."""

    says: str
    sites: tuple[SitePart, ...] = ()
    field: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """``about`` says in a few words what passed, or why there was nothing to check."""

    name: str
    verdict: Verdict
    about: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one relay. ``result`` is the watched run's; None where it broke down."""

    relay: RelayChoice
    checks: tuple[Check, ...]
    result: Result | None
    wall_s: float

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.verdict == "failed")


def judged(name: str, evidence: Sequence[Evidence], *, about: str) -> Check:
    """Failed if there is evidence; ``about`` is what passed otherwise."""
    if evidence:
        return Check(name, "failed", f"{len(evidence)} found", tuple(evidence))
    return Check(name, "passed", about)


def skipped(name: str, why: str) -> Check:
    return Check(name, "not applicable", why)
