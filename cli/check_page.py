"""The page of ``check``: one row for each check, then the evidence of those that failed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from ..profiles.check.conclusion import relay_name
from .page import WIDE, Document, Lines, Page, framed, to_csv
from .source_lines import source_line
from .text import MISSING

_STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim", "not asked": "yellow"}
_LINE = re.compile(r"sched/[\w/]+\.py:\d+")
_CATCHERS = {"run": "clear crash", "tokens": "equality"}
_INDENT = "    "
_NOT_REACHED = "Not reached"
FEW = 4  # sentences of evidence of a check in the first screenful


def page(content: Document, width: int = WIDE, *, few: bool = False) -> Page:  # noqa: ARG001
    """Of the relays of a scenario, or of all faults. The first screenful has the relays that failed, or the only one;
    ``few``: only some sentences of evidence are shown of each check."""
    most = FEW if few else None
    left_out = [Text(f"not asked: {not_asked(content)}", style="dim")] if "not_asked" in content else []
    name = "faults" if "faults" in content else content["scenario"]["expanded"]["name"]
    return Page(
        f"check {name}",
        [*tables(content), Lines([Text(), *evidence(content, most)]), *left_out],
        content["conclusion"],
        footer=(f"`{content['run']['command']}`",),
        rest=[_NOT_REACHED, *_passed(content)],
    )


def _passed(content: Document) -> list[str]:
    """The titles of the relays that passed, where there are several."""
    reports = content.get("reports", ())
    return [
        _title(report, content) for report in reports if len(reports) > 1 and not _failed(report["checks"])
    ]


def as_csv(content: Document) -> str:
    """A row for each check, and one for what was not checked; of all faults, a row for each fault."""
    if "faults" in content:
        rows = [
            [fault["state"], fault["name"], "caught" if (found := _catchers(fault)) else "not caught", found]
            for fault in content["faults"]
        ]
    else:
        rows = [
            [relay_name(report), check["name"], check["verdict"], check["about"]]
            for report in content["reports"]
            for check in report["checks"]
        ]
        rows.append(["", "not asked", "", not_asked(content)])
    return to_csv(["relay", "check", "verdict", "about"], rows)


def not_asked(content: Document) -> str:
    return "; ".join(f"{name}: {text}" for name, text in sorted(content["not_asked"].items()))


def _catchers(fault: Document) -> str:
    return ", ".join(_CATCHERS.get(name, name) for name in fault["caught_by"])


def tables(content: Document) -> Iterator[Table]:
    if "faults" in content:
        yield faults(content)
    for report in content.get("reports", ()):
        yield checks(report, content)
        if report["unproven"]:
            yield unproven(report)


def evidence(content: Document, most: int | None) -> Iterator[Text]:
    """What was found, sentence by sentence, with the source lines that it is about."""
    for fault in content.get("faults", ()):
        for item in _findings(fault)[: 1 if most is None else 0]:
            yield Text.assemble((f"{fault['name']}: ", "bold"), item["says"])
        for check in _failed(fault["sound"]):
            yield from _evidence(f"{fault['name']} off: {check['name']}", check["evidence"], most)
    if "faults" in content:
        yield Text()
    for report in content.get("reports", ()):
        for check in _failed(report["checks"]):
            yield from _evidence(check["name"], check["evidence"], most)
        for check in report["checks"] if most is None else ():
            yield from _evidence(f"known of {check['name']}", check.get("known", []), most)


def checks(report: Document, content: Document) -> Table:
    ran = report.get("numbers")  # since version 1.6
    caption = f"{report['wall_s']:.1f} s; {f'{ran}; ' if ran else ''}no time is judged"
    table = framed(_title(report, content), "check", "verdict", "~", caption=caption, no_wrap=True)
    for check in report["checks"]:
        verdict = check["verdict"]
        table.add_row(check["name"], Text(verdict, style=_STYLES[verdict]), Text(check["about"]))
    return table


def _title(report: Document, content: Document) -> str:
    return f"{content['scenario']['expanded']['name']} · {relay_name(report)}"


def unproven(report: Document) -> Table:
    """What orders in the running configuration, and is not shown to be needed."""
    caption = "waits, events and references: if one is missing, these checks still pass"
    table = framed(_NOT_REACHED, "~source line", "~", caption=caption)
    for entry in report["unproven"]:
        table.add_row(source_line(entry), entry["why"])
    return table


def faults(content: Document) -> Table:
    """One row per known bug: the checks without it, the checks that catch it, and the line that they point at."""
    features = sorted({fault["feature"] for fault in content["awaited"]})
    waiting = f"{len(content['awaited'])} more wait for {', '.join(features)}" if features else ""
    headings = ("fault", "state", "off", "~caught by", "~points at")
    table = framed("known bugs", *headings, caption=waiting, no_wrap=True)
    for fault in content["faults"]:
        clean = "passed" if fault["clean"] else "failed"
        catchers = _catchers(fault)
        table.add_row(
            fault["name"],
            fault["state"],
            Text(clean, style=_STYLES[clean]),
            Text(catchers or "NOTHING", style="" if catchers else _STYLES["failed"]),
            Text(_where(fault)),
        )
    return table


def _where(fault: Document) -> str:
    """The last line that the first evidence names, or else its field."""
    for item in _findings(fault):
        lines = [f"{site['file']}:{site['line']}" for site in item["sites"]] or _LINE.findall(item["says"])
        if lines or item["field"]:
            return lines[-1] if lines else str(item["field"])
    return MISSING


def _findings(fault: Document) -> list[Document]:
    """All evidence, least specific last: how the run broke down."""
    failed = sorted(_failed(fault["broken"]), key=lambda check: check["name"] == "run")
    return [item for check in failed for item in check["evidence"]]


def _failed(checks: list[Document]) -> list[Document]:
    return [check for check in checks if check["verdict"] == "failed"]


def _evidence(name: str, evidence: list[Document], most: int | None) -> Iterator[Text]:
    """The first of each group in full, the others by what they are about and their lines."""
    groups = _groups(evidence)
    for first, *others in groups[:most]:
        yield Text.assemble((f"{name}: ", "bold"), first["says"])
        for site in first["sites"]:
            yield Text(f"{_INDENT}{site['file']}:{site['line']}  {site['statement']}", style="dim")
        for site in first.get("callers", ()):
            called = f"{2 * _INDENT}called at {site['file']}:{site['line']}  {site['statement']}"
            yield Text(called, style="dim")
        yield from _others(others, most)
        yield Text()
    if hidden := sum(map(len, groups[most:])) if most is not None else 0:
        yield Text(f"{name}: and {hidden} more with --all")


def _groups(evidence: list[Document]) -> list[list[Document]]:
    """In the order of their first items. Items without a group, as in earlier documents, are groups of their own."""
    groups: dict[object, list[Document]] = {}
    for number, item in enumerate(evidence):
        groups.setdefault(item.get("group") or number, []).append(item)
    return [*groups.values()]


def _others(evidence: list[Document], most: int | None) -> Iterator[Text]:
    """What the other items of a group are about and their lines, each once."""
    if not evidence:
        return
    yield Text(f"{_INDENT}and {len(evidence)} more {evidence[0]['group']}:")
    places = [*dict.fromkeys(map(_place, evidence))]
    for place in places[:most]:
        yield Text(f"{2 * _INDENT}{place}", style="dim")
    if most is not None and len(places) > most:
        yield Text(f"{2 * _INDENT}and {len(places) - most} more with --all", style="dim")


def _place(item: Document) -> str:
    sites = [f"{site['file']}:{site['line']}" for site in item["sites"]]
    lines = [line for line in sites if not item["field"].endswith(f" at {line}")]
    return f"{item['field']}{': ' if lines else ''}{' and '.join(lines)}"
