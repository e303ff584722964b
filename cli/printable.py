"""Text for terminals and pipes: names come from files and command lines, and could hold escape sequences."""

from __future__ import annotations

import re
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
    """Print a line."""
    typer.echo(printable(text), err=err)
