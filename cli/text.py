"""Text for terminals and pipes.

Names come from files and command lines, and could hold escape sequences. Of numbers zero is ``0``, a missing value is
``–``, and no digit is cut.
"""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from typing import Final

import typer

_KEPT: Final = frozenset(map(ord, "\t\n"))
# The symbols of Unicode for control characters; those from 0x80 on have none.
_PICTURES: Final = (
    {code: 0x2400 + code for code in range(0x20) if code not in _KEPT}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)
_UNESCAPED: Final = re.compile("[\x7f-\x9f]")  # control characters that JSON may hold as they are


def printable(text: str) -> str:
    """The text with a visible character in place of each control character, tabs and line ends aside."""
    return text.translate(_PICTURES)


def printable_json(text: str) -> str:
    """The JSON document with all control characters escaped."""
    return _UNESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def echo(text: str, *, err: bool = False) -> None:
    """Where stderr takes nothing, its text is lost, and the exit code stays."""
    with suppress(OSError) if err else nullcontext():
        typer.echo(printable(text), err=err)


MISSING = "–"


def number(value: float | None) -> str:
    """Integers in full, others with three or four significant digits, with thousands separators."""
    if value is None:
        return MISSING
    size = abs(value)
    if value == 0 or isinstance(value, int) or size >= 1000:
        return f"{value:,.0f}"
    if size < 0.001:
        return "<0.001" if value > 0 else ">-0.001"
    decimals = 3 if size < 1 else 2 if size < 10 else 1
    return f"{value:.{decimals}f}"


def whole(value: float) -> float:
    """A float that is a whole number as an int, so that it is written as one."""
    return int(value) if value == int(value) else value


def percent(ratio: float | None) -> str:
    if ratio is None:
        return MISSING
    return f"{100 * ratio:.1f}" if ratio else "0"


def signed(value: float | None) -> str:
    """With its sign and two decimals; zero without."""
    return MISSING if value is None else "0" if value == 0 else f"{value:+.2f}"


def size(count: int) -> str:
    """Bytes with a binary unit."""
    if count < 1024:
        return f"{count} B"
    scaled = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        scaled /= 1024
        if scaled < 1024:
            return f"{number(scaled)} {unit}"
    return f"{number(scaled / 1024)} TiB"


def cut_left(text: str, width: int) -> str:
    """Keeps the end of a text that is too long, which is the file of a path."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def cut_right(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
