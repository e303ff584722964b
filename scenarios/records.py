"""One request of a trace, and typed access to the fields of its record."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from .problems import show
from .workload_schema import Sampling

MAX_TOKENS = 2**24
MAX_RECORD = 2**24  # bytes of one line or conversation
MAX_ERRORS = 20  # reported one by one
MAX_COUNTED = 10_000  # errors after which reading ends
_LAST = 2**62  # ns; a century and a half


class TraceError(Exception):
    """A trace does not follow its format. ``line`` is that of the first error; ``more`` reports the others."""

    def __init__(self, file: str, line: int, message: str, more: Sequence[str] = ()) -> None:
        self.file, self.line, self.message = file, line, message
        super().__init__("\n".join((f"{file}:{line}: {message}", *more)))


class TraceErrors:
    """The errors of one trace: the first ``MAX_ERRORS``, and the number of all."""

    def __init__(self) -> None:
        self.first: list[TraceError] = []
        self.count = 0

    def append(self, error: TraceError) -> None:
        self.count += 1
        if len(self.first) < MAX_ERRORS:
            self.first.append(error.with_traceback(None))

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
    """A line of a trace, or the line on which a record begins."""

    file: str
    number: int

    def error(self, message: str) -> TraceError:
        return TraceError(self.file, self.number, message)


@dataclass(frozen=True, slots=True)
class RecordFields:
    """The fields of one record. Every getter raises TraceError with the line and what was expected."""

    line: TraceLine
    fields: Mapping[str, Any]

    def count(self, name: str, *, minimum: int) -> int:
        value = self.fields.get(name)
        if type(value) is not int or not minimum <= value <= MAX_TOKENS:
            wanted = f"a whole number of tokens from {minimum} to {MAX_TOKENS}"
            raise self.error(name, wanted)
        return value

    def instant(self, name: str, *, unit: int) -> int:
        """A time in ns, written in units of ``unit`` ns."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LAST / unit:
            raise self.error(name, "a time, not negative")
        return round(value * unit)

    def ids(self, name: str, *, below: int) -> array[int]:
        """A list of integers in [0, below)."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < below for item in value):
            raise self.error(name, f"a list of whole numbers from 0 to {below - 1}")
        return array("q", value)

    def error(self, name: str, wanted: str) -> TraceError:
        got = show(self.fields[name]) if name in self.fields else "nothing"
        return self.line.error(f"{name}: expected {wanted}, got {got}")


def lines(file: BinaryIO, name: str, errors: TraceErrors) -> Iterator[tuple[TraceLine, str]]:
    """The lines that are not blank, decoded; one that is no text becomes an error. A line that is too long ends the
    reading."""
    number = 0
    while not errors.full and (raw := file.readline(MAX_RECORD + 1)):
        number += 1
        line = TraceLine(name, number)
        if len(raw) > MAX_RECORD:
            raise line.error(f"expected lines of at most {MAX_RECORD} bytes")
        try:
            text = decoded(raw, line).strip()
        except TraceError as error:
            errors.append(error)
            continue
        if text:
            yield line, text


def decoded(raw: bytes, line: TraceLine) -> str:
    try:
        return raw.decode("utf-8-sig" if line.number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise line.error(f"expected UTF-8 text, got byte 0x{raw[error.start]:02x}") from None
