"""The objects of a JSON array, one at a time: files of this kind are too large to be read at once."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from .records import MAX_RECORD, TraceError, TraceLine

_CHUNK = 1 << 16
_SPACE = re.compile(r"[ \t\r\n]*")


def objects(file: BinaryIO, name: str) -> Iterator[tuple[TraceLine, dict[str, Any]]]:
    """Each object with the line on which it begins. Raises TraceError."""
    window = _Window(file, name)
    if window.peek() != "[":
        raise window.line().error("expected a JSON array, beginning with '['")
    window.drop(1)
    more = window.peek() != "]"
    while more:
        if window.peek() != "{":
            raise window.line().error("expected an object")
        yield window.line(), window.object()
        if (after := window.peek()) not in (",", "]"):
            raise window.line().error("expected ',' or ']' after a conversation")
        more = after == ","
        window.drop(1)


class _Window:
    """The part of the file that is being parsed. It grows until it holds a whole object, then moves past it.

    The text is copied only when more of the file is read, not for every object.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name = file, name
        self.text = ""
        self.place = 0  # in the text, of what comes next
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.newlines = 0

    def line(self) -> TraceLine:
        return TraceLine(self.name, self.newlines + 1)

    def peek(self) -> str:
        """The next character that is no white space; "" at the end."""
        while True:
            space = _SPACE.match(self.text, self.place)
            assert space is not None
            self.drop(space.end() - self.place)
            if self.place < len(self.text) or not self.grow():
                return self.text[self.place : self.place + 1]

    def object(self) -> dict[str, Any]:
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.text, self.place)
            except (ValueError, RecursionError) as error:
                if len(self.text) - self.place > MAX_RECORD or not self.grow():
                    raise self.broken(error) from None
            else:
                self.drop(end - self.place)
                return dict(value)

    def drop(self, length: int) -> None:
        self.newlines += self.text.count("\n", self.place, self.place + length)
        self.place += length

    def grow(self) -> bool:
        """Doubles the text, so that retries take no longer than the reading. Returns False at the end of the file."""
        self.text, self.place = self.text[self.place :], 0
        raw = self.file.read(max(_CHUNK, len(self.text)))
        try:
            self.text += self.decoder.decode(raw, final=not raw)
        except UnicodeDecodeError:
            raise self.line().error("expected UTF-8 text") from None
        return bool(raw)

    def broken(self, error: ValueError | RecursionError) -> TraceError:
        if not isinstance(error, json.JSONDecodeError):
            return self.line().error(f"not JSON: {error}")
        number = self.newlines + self.text.count("\n", self.place, error.pos) + 1
        return TraceLine(self.name, number).error(f"not JSON: {error.msg}")
