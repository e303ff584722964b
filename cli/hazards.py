"""Hazards of a run as a table: whose memory, the two accesses, and the edge that is missing."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

Document = dict[str, Any]


def count(hazards: Document) -> str:
    """In a few words; nothing where nobody looked."""
    if "abstained" in hazards:
        return ""
    parts = [f"{len(hazards['findings'])} undeclared"] if hazards["findings"] else []
    parts += [f"known: {', '.join(hazards['known'])}"] if hazards["known"] else []
    return "; ".join(parts) or "none"


def table(hazards: Document) -> Table:
    """Undeclared findings."""
    table = Table(
        title="undeclared hazards",
        title_justify="left",
        title_style="bold red",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for heading in ("resource", "first", "second", "missing"):
        table.add_column(heading, overflow="fold")
    for finding in hazards["findings"]:
        table.add_row(
            Text(finding["resource"]),
            _access(finding["first"]),
            _access(finding["second"]) if finding["second"] else Text("nobody"),
            Text(finding["missing"]),
        )
    return table


def listed(hazards: Document) -> str:
    """Undeclared findings, a line each."""
    return "\n".join(
        f"hazard: {finding['resource']}: {finding['missing']}" for finding in hazards["findings"]
    )


def _access(access: Document) -> Text:
    site = access["site"]
    where = f"{site['file']}:{site['line']}" if site else "unknown line"
    statement = f"\n{site['statement']}" if site else ""
    return Text.assemble(f"{access['op']} on {access['stream']}\n{where}", (statement, "dim"))
