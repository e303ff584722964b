"""A check in one sentence, from its document."""

from __future__ import annotations

from typing import Any

from ..record.conclusion import engine_name, listed, number_of

Document = dict[str, Any]

AGAINST = "against"
_NAMED = 4  # relays, faults


def conclusion(content: Document) -> str:
    """Return which checks passed, or which failed with the first evidence of each; of all known bugs, which are not
    caught."""
    return f"{_of_faults(content) if 'faults' in content else _of_reports(content)}."


def relay_name(report: Document) -> str:
    """The engine, or the relay's state with its switches and faults."""
    if report["engine"]:
        return engine_name(report["engine"])
    if asked := report.get("asked_engine"):  # which crashed before it said more; since version 1.3
        return str(asked)
    relay = report["relay"]
    switches = [f"{name}={value}" for name, value in relay["switches"].items()]
    return " · ".join([relay["state"], *switches, *(f"fault {name}" for name in relay["faults"])])


def _of_faults(content: Document) -> str:
    faults = content["faults"]
    missed = [fault["name"] for fault in faults if not fault["caught_by"]]
    unclean = [fault["name"] for fault in faults if not fault["clean"]]
    said = f"all {len(faults)} known bugs are caught"
    if missed:
        said = f"{len(missed)} of {len(faults)} known bugs are NOT caught: {listed(missed, _NAMED)}"
    return f"{said}; checks FAIL without the bug: {listed(unclean, _NAMED)}" if unclean else said


def _of_reports(content: Document) -> str:
    name = content["scenario"]["expanded"]["name"]
    failed = [report for report in content["reports"] if _named(report, "failed")]
    unasked = _without_verdict(content, "not asked")
    if failed:
        failures = [
            f"{', '.join(_named(report, 'failed'))} with {relay_name(report)}" for report in failed[:_NAMED]
        ]
        new = f"not found in {failed[0]['against']}" if failed[0].get("against") else ""
        crashed = (one["about"] for one in failed[0]["checks"] if one["name"] == AGAINST)
        new = f"; {next(crashed, new)}" if new else ""
        return f"{name} FAILED: {'; '.join(failures)}{new}{_first_evidence(failed[0])}{unasked}"
    relays = listed([relay_name(report) for report in content["reports"]], _NAMED)
    first, *others = content["reports"]
    if unasked:
        last = content["reports"][-1]
        passed = ", ".join(_named(last, "passed")) or "nothing"
        return f"{name} interrupted with {relay_name(last)}: {passed} passed{unasked}"
    passed = ", ".join(_named(first, "passed")) if not others else "all checks that apply"
    unproven = sum(len(report["unproven"]) for report in content["reports"])
    inapplicable = _without_verdict(content, "not applicable")
    return f"{name} passed with {relays}: {passed}{_known(first)}{inapplicable}{_reach(unproven)}"


def _known(report: Document) -> str:
    """What the source has that an engine was checked against; documents before version 1.3 do not say so."""
    counts = {check["name"]: len(check.get("known", ())) for check in report["checks"]}
    known = [f"{number_of(count, 'finding')} of {name}" for name, count in counts.items() if count]
    return f"; known from {report['against']}: {', '.join(known)}" if known else ""


def _reach(unproven: int) -> str:
    if not unproven:
        return ""
    which = f"any one of {unproven}" if unproven > 1 else "one of the"
    return f"; the checks would also pass without {which} waits, events or references, which --all lists"


def _named(report: Document, verdict: str) -> list[str]:
    return [check["name"] for check in report["checks"] if check["verdict"] == verdict]


def _without_verdict(content: Document, why: str) -> str:
    """The checks that do not apply, or that an interruption left out."""
    names = dict.fromkeys(name for report in content["reports"] for name in _named(report, why))
    return f"; {why}: {', '.join(names)}" if names else ""


def _first_evidence(report: Document) -> str:
    """Of each failed check, with the number of its other findings: the first about a line outside of the shipped
    scheduler, such as one of a relay of the user's own. A check that failed alone is not named again."""
    failed = [check for check in report["checks"] if check["verdict"] == "failed"]
    found = {check["name"]: check["evidence"] for check in failed if check["evidence"]}
    named = {name: f"{name}: " if len(failed) > 1 else "" for name in found}
    more = {name: f", and {len(items) - 1} more" if len(items) > 1 else "" for name, items in found.items()}
    first = {name: min(items, key=_is_shipped)["says"].rstrip(".") for name, items in found.items()}
    return "".join(f"; {named[name]}{first[name]}{more[name]}" for name in found)


def _is_shipped(evidence: Document) -> bool:
    return all(site["file"].startswith("sched/") for site in evidence.get("sites", ()))
