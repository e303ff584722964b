"""Hazards of a run: the resource, the two accesses, and the ordering that is missing between them."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from .page import Document, framed


def count(hazards: Document) -> str:
    """A summary in a few words; empty where hazards were not watched for."""
    if "abstained" in hazards:
        return ""
    parts = [f"{len(hazards['findings'])} undeclared"] if hazards["findings"] else []
    parts += [f"known: {', '.join(hazards['known'])}"] if hazards["known"] else []
    return "; ".join(parts) or "none"


def table(hazards: Document) -> Table:
    """Undeclared findings."""
    table = framed("undeclared hazards", title_style="bold red")
    for heading in ("resource", "first", "second", "missing"):
        table.add_column(heading, overflow="fold")
    for finding in hazards["findings"]:
        table.add_row(
            Text(finding["resource"]),
            _access(finding["first"]),
            _access(finding["second"]) if finding["second"] else Text("none"),
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
