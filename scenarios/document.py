"""YAML to plain values, with the place of every key.

The scalars are those of YAML 1.2's core schema: ``1e9`` is a number, ``017`` is seventeen, ``off`` and ``no``
are words (the schema takes them for booleans where it has one). Duplicate keys are problems; so are anchors,
aliases and tags, so that a short file cannot expand to a large one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import yaml

from .problems import KeyPath, Problem, ScenarioError, SourceLocation, dotted

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"

MAX_BYTES = 64 * 1024
MAX_DEPTH = 16

_CONSTANTS: dict[str, Value] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]{1,4000}")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)


@dataclass(slots=True)
class Document:
    """``places`` has an entry for every path of ``data``. ``problems`` are those that did not prevent the reading."""

    data: Value
    places: dict[KeyPath, SourceLocation]
    problems: list[Problem] = field(default_factory=list)


def read(content: bytes, file: str) -> Document:
    """Read one YAML document. Raises ScenarioError when the text is no YAML at all."""
    return compose(_text(content, file), SourceLocation(file, 1))


def compose(text: str, start: SourceLocation) -> Document:
    """Read ``text``; lines are counted where ``start`` has one. Raises ScenarioError."""
    composer = _Composer(start)
    try:
        composer.events = yaml.parse(text, Loader=yaml.SafeLoader)
        data = composer.document()
    except yaml.MarkedYAMLError as error:
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise composer.fatal(f"not YAML: {reason}", error.problem_mark or error.context_mark) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise composer.fatal(f"not YAML: {str(error).splitlines()[0]}", None) from None
    return Document(data, composer.places, composer.problems)


def scalar(text: str) -> Value:
    """A plain (unquoted) scalar's value."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _text(content: bytes, file: str) -> str:
    if len(content) > MAX_BYTES:
        message = f"expected a file of at most {MAX_BYTES} bytes"
        raise ScenarioError([Problem(SourceLocation(file), "", message)])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = SourceLocation(file, content.count(b"\n", 0, error.start) + 1)
        message = f"expected UTF-8 text, got byte 0x{content[error.start]:02x}"
        raise ScenarioError([Problem(place, "", message)]) from None


class _Mark(Protocol):
    @property
    def line(self) -> int:
        """From 0."""


class _Composer:
    """Builds values from parser events. Only this class recurses, since the parser keeps a stack of its own."""

    def __init__(self, start: SourceLocation) -> None:
        self.start = start
        self.events: Iterator[yaml.Event] = iter(())
        self.places: dict[KeyPath, SourceLocation] = {}
        self.problems: list[Problem] = []

    def document(self) -> Value:
        next(self.events)  # stream start
        if isinstance(next(self.events), yaml.StreamEndEvent):
            self.places[()] = self.start
            return None
        value = self.value(next(self.events), ())
        next(self.events)  # document end
        if not isinstance(more := next(self.events), yaml.StreamEndEvent):
            raise self.fatal("expected one document, got a second one", more.start_mark)
        return value

    def value(self, event: yaml.Event, path: KeyPath) -> Value:
        """The node that begins with ``event``. Of two values at one path the first one's place is kept."""
        self.places.setdefault(path, self.at(event.start_mark))
        self.refuse_sharing(event, path)
        if len(path) > MAX_DEPTH:
            raise self.fatal(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(path)
        return self.scalar(event, path)

    def mapping(self, path: KeyPath) -> dict[str, Value]:
        values: dict[str, Value] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.key(event, path)
            at = self.at(event.start_mark)
            if key in values:
                first = self.places[*path, key]
                self.complain((*path, key), at, f"duplicate key, first given at line {first.line or 1}")
            self.places.setdefault((*path, key), at)
            value = self.value(next(self.events), (*path, key))
            values.setdefault(key, value)
        return values

    def sequence(self, path: KeyPath) -> list[Value]:
        values: list[Value] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            values.append(self.value(event, (*path, len(values))))
        return values

    def key(self, event: yaml.Event, path: KeyPath) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            raise self.fatal("expected a name as key, got a list, mapping or alias", event.start_mark)
        self.refuse_sharing(event, path)
        return self.text(event, path)

    def scalar(self, event: yaml.Event, path: KeyPath) -> Value:
        if not isinstance(event, yaml.ScalarEvent):
            return None
        text = self.text(event, path)
        return scalar(text) if event.style is None else text

    def text(self, event: yaml.ScalarEvent, path: KeyPath) -> str:
        """The scalar with JSON's surrogate pairs, which YAML does not have, joined to characters."""
        text = str(event.value)
        try:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            self.complain(path, self.at(event.start_mark), "expected text, got half of a surrogate pair")
            return ascii(text)

    def refuse_sharing(self, event: yaml.Event, path: KeyPath) -> None:
        if getattr(event, "anchor", None):
            self.complain(path, self.at(event.start_mark), "anchors and aliases are not supported")
        if getattr(event, "tag", None):
            self.complain(path, self.at(event.start_mark), "tags are not supported")

    def at(self, mark: _Mark | None) -> SourceLocation:
        if mark is None or self.start.line is None:
            return self.start
        return SourceLocation(self.start.file, self.start.line + mark.line)

    def complain(self, path: KeyPath, place: SourceLocation, message: str) -> None:
        self.problems.append(Problem(place, dotted(path), message))

    def fatal(self, message: str, mark: _Mark | None) -> ScenarioError:
        place = self.at(mark) if mark else SourceLocation(self.start.file)
        return ScenarioError([*self.problems, Problem(place, "", message)])
