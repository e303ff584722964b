"""Verdicts of checks, their evidence, and the document of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic_core import to_jsonable_python

from ...sched.relay.choice import RelayChoice
from ..record.conclusion import numbers
from ..record.environment import environment, tool
from ..record.provenance import ScenarioPart
from ..record.result import Result, SitePart
from ..record.timeline import OrderKind
from .conclusion import conclusion

Verdict = Literal["passed", "failed", "not applicable", "not asked"]


@dataclass(frozen=True, slots=True)
class Unproven:
    """A wait, event or reference without which all runs of a check would be the same, and why."""

    kind: OrderKind
    site: SitePart
    why: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """A sentence, with the source lines or the ``field`` of a batch or buffer that it is about. Evidence with the same
    ``group``, which is a part of a sentence, may have the same cause. ``callers`` of the last line, the innermost
    first: that line may be of a helper."""

    says: str
    sites: tuple[SitePart, ...] = ()
    field: str = ""
    group: str = ""
    callers: tuple[SitePart, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """``about`` says in a few words what passed, or why the check does not apply or was not asked. ``known`` is
    evidence that the other source of the engine shows, too."""

    name: str
    verdict: Verdict
    about: str
    evidence: tuple[Evidence, ...] = ()
    known: tuple[Evidence, ...] = ()


@dataclass(slots=True)
class Report:
    """All checks of one relay. ``engine`` is the engine's name, as it was asked for; None for our own scheduler.
    ``result`` is the checked run's; None if it crashed. ``unproven``: what could be missing without a failed check.
    ``against`` names the other source that an engine was checked against, because a check failed. ``cancelled``: the
    user interrupted the checks."""

    relay: RelayChoice
    engine: str | None = None
    checks: list[Check] = field(default_factory=list)
    result: Result | None = None
    unproven: Sequence[Unproven] = ()
    against: str | None = None
    cancelled: bool = False
    wall_s: float = 0.0

    @property
    def failed(self) -> tuple[Check, ...]:
        return failed(self.checks)

    @contextmanager
    def interruptible(self, names: Sequence[str]) -> Iterator[None]:
        """``names`` are of the checks that the block asks. An interruption ends the block, not its caller, and leaves
        what was found."""
        begin = time.perf_counter()
        try:
            yield
        except KeyboardInterrupt:
            self.cancelled = True
            asked = {check.name for check in self.checks}
            self.checks += [
                Check(name, "not asked", "interrupted before its end") for name in names if name not in asked
            ]
        self.wall_s = time.perf_counter() - begin


def verdict(name: str, evidence: Sequence[Evidence], *, about: str) -> Check:
    """A failed check if there is evidence; otherwise a passed one with ``about``."""
    if evidence:
        return Check(name, "failed", f"{len(evidence)} found", tuple(evidence))
    return Check(name, "passed", about)


def failed(checks: Iterable[Check]) -> tuple[Check, ...]:
    return tuple(check for check in checks if check.verdict == "failed")


def skipped(name: str, why: str) -> Check:
    return Check(name, "not applicable", why)


# History: 1.0 the first; 1.1 has a conclusion; 1.2 groups hazards between the same streams; 1.3 has what is known;
# 1.4 has interrupted checks; 1.5 has the callers of a hazard's line; 1.6 says what kind of numbers a run had.
SCHEMA_VERSION: Final = "1.6"

Document = dict[str, Any]


def document(
    scenario: ScenarioPart, reports: Sequence[Report], *, not_asked: Mapping[str, str], run: Document
) -> Document:
    """All checks of all relays with their evidence. ``scenario`` and ``run`` are as in a result document. An
    interrupted check has not passed."""
    return concluded(
        run,
        scenario=scenario,
        passed=not (run["cancelled"] or any(report.failed for report in reports)),
        reports=[_report(report) for report in reports],
        not_asked=not_asked,
    )


def concluded(run: Document, **content: Any) -> Document:
    """The document of checks with its conclusion, as plain dicts, lists and scalars."""
    head = {"schema_version": SCHEMA_VERSION, "tool": tool(), "run": run, "environment": environment()}
    plain: Document = to_jsonable_python(head | content)
    return plain | {"conclusion": conclusion(plain)}


def _report(report: Report) -> Document:
    relay, result = report.relay, report.result
    return {
        "engine": result and result.labels.engine,
        "asked_engine": report.engine,
        "against": report.against,
        "relay": {
            "state": relay.state.name,
            "switches": relay.overrides,
            "faults": [fault.name for fault in relay.faults],
        },
        "numbers": result and numbers(result.labels.model_dump(), result.hardware.name),
        "outputs": result and result.outputs,
        "hazards_s": result and result.run.hazards_s,
        "wall_s": report.wall_s,
        "checks": report.checks,
        "unproven": report.unproven,
    }
