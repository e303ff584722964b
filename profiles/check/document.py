"""What ``check`` found, as a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..platform.resolve import Resolved
from ..record.environment import environment, tool
from ..record.result import canonical
from .verdicts import Check, Report

# History: 1.0 the first.
SCHEMA_VERSION: Final = "1.0"

Document = dict[str, Any]


def document(resolved: Resolved, reports: Sequence[Report], *, run: Document) -> Document:
    """``run`` is as in a result document. Every check of every relay, with its evidence."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": tool().model_dump(mode="json"),
        "run": run,
        "environment": environment(),
        "scenario": {"expanded": resolved.scenario.expanded(), "sha256": resolved.scenario.sha256},
        "passed": not any(report.failed for report in reports),
        "reports": [_report(report) for report in reports],
    }


def _report(report: Report) -> Document:
    relay = report.relay
    return {
        "relay": {
            "state": relay.state.name,
            "switches": dict(relay.overrides),
            "faults": [fault.name for fault in relay.faults],
        },
        "outputs": report.result.outputs.model_dump(mode="json") if report.result else None,
        "hazards_s": report.result.run.hazards_s if report.result else None,
        "wall_s": report.wall_s,
        "checks": [check_part(check) for check in report.checks],
    }


def check_part(check: Check) -> Document:
    return {
        "name": check.name,
        "verdict": check.verdict,
        "about": check.about,
        "evidence": [
            {
                "says": evidence.says,
                "sites": [site.model_dump(mode="json") for site in evidence.sites],
                "field": evidence.field,
            }
            for evidence in check.evidence
        ],
    }


def to_json(content: Document) -> str:
    return canonical(content)
