"""What tables are built from: their frame, and the order of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

from rich import box
from rich.table import Table

from ..sched.observe import StepKind

Document = dict[str, Any]

_KINDS = get_args(StepKind)


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
    """In the order of ``known``, then all others by name."""
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def ordered_kinds(kinds: Iterable[str]) -> list[str]:
    """Kinds of steps in the order of ``StepKind``, ``decode.steady`` after ``decode``."""
    return sorted(kinds, key=lambda kind: (_place(kind.partition(".")[0]), kind))


def _place(kind: str) -> int:
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS)
