"""The page of the library of cases: each reported change beside what was found here, and how firmly that stands."""

from __future__ import annotations

from .page import WIDE, Document, Page, framed
from .text import MISSING, number

COLUMNS = ("case", "source", "A → B", "reported", "expected", "found", "A, B, Δ", "under draws")


def page(document: Document, width: int = WIDE, *, few: bool = False) -> Page:  # noqa: ARG001
    table = framed("", *COLUMNS)
    for name, case in document["cases"].items():
        table.add_row(*row(name, case["comparison"]))
    return Page("the library of cases", [table], document["conclusion"])


def row(name: str, found: Document) -> tuple[str, ...]:
    """One case in Markdown; a verdict other than the expected one is bold."""
    case = found["case"]
    metric = found["metrics"][case["metric"]]
    verdict = ": ".join([found["verdict"], ", ".join(found["reasons"])]).removesuffix(": ")
    return (
        f"`{name.rpartition('/')[2]}`",
        case["source"],
        f"`{case['a']}` → `{case['b']}`",
        case["reported"],
        f"{case['metric']} {case['expect']}",
        verdict if verdict == case["expect"] else f"**{verdict}**",
        _figures(metric),
        _under_draws(metric["firmness"], doubted="CONSTANTS" in found["reasons"]),
    )


def _figures(metric: Document) -> str:
    extent = f"[{_signed(metric['ci_low'])}, {_signed(metric['ci_high'])}]"
    values = f"{number(metric['a'])}, {number(metric['b'])} {metric['unit']}"
    return f"{values}, {_signed(metric['delta_pct'])} % {extent}"


def _under_draws(firmness: Document | None, *, doubted: bool) -> str:
    """In how many draws the sign holds, the range of the effect, and what decides a verdict that does not stand."""
    if firmness is None:
        return MISSING
    if "abstained" in firmness:
        return str(firmness["abstained"])
    extent = f"{_signed(firmness['low'])} … {_signed(firmness['high'])} %"
    follows = f"; follows `{firmness['constant']}`, {_signed(firmness['correlation'])}" if doubted else ""
    return f"{firmness['holding']} of {firmness['draws']}, {extent}{follows}"


def _signed(value: float | None) -> str:
    return MISSING if value is None else f"{value:+.2f}"
