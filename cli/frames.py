"""What tables are built from: their frame, and the order of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

Document = dict[str, Any]

KINDS = ("prefill", "mixed", "decode", "decode.steady", "draft", "verify", "draft_extend", "prebuilt", "idle")


def framed(title: str, *, caption: str = "") -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )


def ordered(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """In the order of ``known``; others behind, by name."""
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))
