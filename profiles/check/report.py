"""Verdicts of checks, their evidence, and the document of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from ...sched.relay.choice import RelayChoice
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
    ``group``, which is a part of a sentence, may have the same cause."""

    says: str
    sites: tuple[SitePart, ...] = ()
    field: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """``about`` says in a few words what passed, or why the check does not apply or was not asked. ``known`` is
    evidence that the other source of the engine shows, too."""

    name: str
    verdict: Verdict
    about: str
    evidence: tuple[Evidence, ...] = ()
    known: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one relay. ``result`` is the checked run's; None if it crashed. ``unproven``: what could be missing
    without a failed check. ``against`` names the other source that an engine was checked against, because a check
    failed. ``engine`` is the engine's name, as it was asked for; None for our own scheduler. ``cancelled``: the user
    interrupted the checks."""

    relay: RelayChoice
    checks: tuple[Check, ...]
    result: Result | None
    wall_s: float
    unproven: Sequence[Unproven] = ()
    against: str | None = None
    engine: str | None = None
    cancelled: bool = False

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.verdict == "failed")


@dataclass(slots=True)
class Examination:
    """A report in the making, which keeps what it has where the user interrupts it."""

    relay: RelayChoice
    engine: str | None = None
    checks: list[Check] = field(default_factory=list)
    result: Result | None = None
    unproven: Sequence[Unproven] = ()
    cancelled: bool = False
    _begin: float = field(default_factory=time.perf_counter)

    @contextmanager
    def interruptible(self, names: Sequence[str]) -> Iterator[None]:
        """``names`` are of the checks that the block asks. An interruption ends the block, not its caller."""
        try:
            yield
        except KeyboardInterrupt:
            self.cancelled = True
            asked = {check.name for check in self.checks}
            self.checks += [
                Check(name, "not asked", "interrupted before its end") for name in names if name not in asked
            ]

    def report(self) -> Report:
        wall_s = time.perf_counter() - self._begin
        return Report(
            self.relay,
            tuple(self.checks),
            self.result,
            wall_s,
            self.unproven,
            engine=self.engine,
            cancelled=self.cancelled,
        )


def verdict(name: str, evidence: Sequence[Evidence], *, about: str) -> Check:
    """A failed check if there is evidence; otherwise a passed one with ``about``."""
    if evidence:
        return Check(name, "failed", f"{len(evidence)} found", tuple(evidence))
    return Check(name, "passed", about)


def skipped(name: str, why: str) -> Check:
    return Check(name, "not applicable", why)


# History: 1.0 the first; 1.1 has a conclusion; 1.2 groups hazards between the same streams; 1.3 has what is known;
# 1.4 has interrupted checks.
SCHEMA_VERSION: Final = "1.4"

Document = dict[str, Any]
_PARTS: Final = TypeAdapter(tuple[Check | Unproven, ...])


def document(
    scenario: ScenarioPart, reports: Sequence[Report], *, not_asked: Mapping[str, str], run: Document
) -> Document:
    """All checks of all relays with their evidence. ``scenario`` and ``run`` are as in a result document. An
    interrupted check has not passed."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "tool": tool().model_dump(mode="json"),
        "run": run,
        "environment": environment(),
        "scenario": scenario.model_dump(mode="json"),
        "passed": not (run["cancelled"] or any(report.failed for report in reports)),
        "reports": [_report(report) for report in reports],
        "not_asked": dict(not_asked),
    }
    return content | {"conclusion": conclusion(content)}


def _report(report: Report) -> Document:
    relay = report.relay
    engine = report.result.labels.engine if report.result else None
    return {
        "engine": None if engine is None else engine.model_dump(mode="json"),
        "asked_engine": report.engine,
        "against": report.against,
        "relay": {
            "state": relay.state.name,
            "switches": dict(relay.overrides),
            "faults": [fault.name for fault in relay.faults],
        },
        "outputs": report.result.outputs.model_dump(mode="json") if report.result else None,
        "hazards_s": report.result.run.hazards_s if report.result else None,
        "wall_s": report.wall_s,
        "checks": plain(report.checks),
        "unproven": plain(report.unproven),
    }


def plain(parts: Sequence[Check | Unproven]) -> list[Document]:
    """Plain dicts, lists and scalars."""
    found: list[Document] = _PARTS.dump_python(tuple(parts), mode="json")
    return found
