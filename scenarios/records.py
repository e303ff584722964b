"""The records of a trace: its lines or the objects of a JSON array, one at a time, and typed access to their fields."""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, NamedTuple

from .problems import show
from .workload_schema import Sampling

BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for
MAX_TOKENS = 2**24
MAX_RECORD = 2**24  # bytes of one line or conversation
MAX_ERRORS = 20  # reported one by one
MAX_COUNTED = 10_000  # errors after which reading ends
_LAST = 2**62  # ns; a century and a half
_CHUNK = 1 << 16
_SPACE = re.compile(r"[ \t\r\n]*")


class TraceError(Exception):
    """A trace does not follow its format. ``line`` is that of the first error; ``more`` reports the others."""

    def __init__(self, file: str, line: int, message: str, more: Sequence[str] = ()) -> None:
        self.file, self.line, self.message = file, line, message
        super().__init__("\n".join((f"{file}:{line}: {message}", *more)))


class TraceErrors:
    """The errors of one trace: the first ``MAX_ERRORS``, and the number of all. A TraceError ends a block that is
    entered with it, and is one of them."""

    def __init__(self) -> None:
        self.first: list[TraceError] = []
        self.count = 0

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, TraceError):
            return False
        self.count += 1
        if len(self.first) < MAX_ERRORS:
            self.first.append(error.with_traceback(None))
        return True

    @property
    def full(self) -> bool:
        """Whether reading ends here: a file of something else may have no end."""
        return self.count >= MAX_COUNTED

    def joined(self) -> TraceError:
        """One error that reports all, of more than ``MAX_ERRORS`` only the number."""
        first, more = self.first[0], [str(error) for error in self.first[1:]]
        if rest := self.count - len(self.first):
            more.append(f"{first.file}: and {'at least ' * self.full}{rest} more malformed records")
        return TraceError(first.file, first.line, first.message, more)


class TraceRecord(NamedTuple):
    """``arrival`` is in ns on the trace's own clock, None where it has none."""

    line: int
    prompt_tokens: int
    output_tokens: int
    arrival: int | None = None
    hash_ids: tuple[int, ...] = ()
    prompt_ids: array[int] | None = None
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class TraceLine:
    """A line of a trace, or the line on which a record begins, and the record's fields. Every getter raises TraceError
    with the line and what was expected."""

    file: str
    number: int
    fields: Mapping[str, Any] = field(default_factory=dict)

    def error(self, message: str) -> TraceError:
        return TraceError(self.file, self.number, message)

    def count(self, name: str, *, minimum: int) -> int:
        value = self.fields.get(name)
        if type(value) is not int or not minimum <= value <= MAX_TOKENS:
            wanted = f"a whole number of tokens from {minimum} to {MAX_TOKENS}"
            raise self.unexpected(name, wanted)
        return value

    def instant(self, name: str, *, unit: int) -> int:
        """A time in ns, written in units of ``unit`` ns."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LAST / unit:
            raise self.unexpected(name, "a time, not negative")
        return round(value * unit)

    def ids(self, name: str, *, below: int) -> array[int]:
        """A list of integers in [0, below)."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < below for item in value):
            raise self.unexpected(name, f"a list of whole numbers from 0 to {below - 1}")
        return array("q", value)

    def unexpected(self, name: str, wanted: str) -> TraceError:
        got = show(self.fields[name]) if name in self.fields else "nothing"
        return self.error(f"{name}: expected {wanted}, got {got}")


def lines(file: BinaryIO, name: str, errors: TraceErrors) -> Iterator[tuple[TraceLine, str]]:
    """The lines that are not blank, decoded; one that is no text becomes an error. A line that is too long ends the
    reading."""
    number = 0
    while not errors.full and (raw := file.readline(MAX_RECORD + 1)):
        number += 1
        line = TraceLine(name, number)
        if len(raw) > MAX_RECORD:
            raise line.error(f"expected lines of at most {MAX_RECORD} bytes")
        with errors:
            if text := decoded(raw, line).strip():
                yield line, text


def decoded(raw: bytes, line: TraceLine) -> str:
    try:
        return raw.decode("utf-8-sig" if line.number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise line.error(f"expected UTF-8 text, got byte 0x{raw[error.start]:02x}") from None


def objects(file: BinaryIO, name: str, errors: TraceErrors) -> Iterator[TraceLine]:  # noqa: ARG001
    """Each object of a JSON array, which is too large to be read at once. A syntax error raises TraceError and ends the
    reading: where the next object begins is unknown."""
    window = _Window(file, name)
    if window.peek() != "[":
        raise window.line().error("expected a JSON array, beginning with '['")
    window.drop(1)
    more = window.peek() != "]"
    while more:
        if window.peek() != "{":
            raise window.line().error("expected an object")
        line = window.line()
        yield replace(line, fields=window.object())
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
