"""The source lines of the watched code that make calls: found cheaply for each call, resolved only when read."""

from __future__ import annotations

import ast
import linecache
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import dropwhile, islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from ..record.timeline import NO_SITE, Site

_CALLERS: Final = 2  # of a line, which may be one of a helper
_HERE: Final = Path(__file__).resolve()
# Files whose lines are never recorded. A watched program may lie beside this checkout.
_UNWATCHED: Final = _HERE.parents[1], _HERE.parents[2] / "sched" / "streams.py"


class Sites:
    """Source lines by small index, in the order of their first calls.

    A line is watched if its file lies under one of ``watch`` (folders or files), is neither in ``profiles/`` nor in an
    environment of installed packages there, and is not ``sched/streams.py``: all waits of streams go through its
    methods, so that their callers' lines are recorded. Files are named relative to the watched folder's parent.
    """

    def __init__(self, watch: Sequence[Path]) -> None:
        self._watch = tuple(path.resolve() for path in watch)
        # Indices by offset, of watched code; None for other code. By id, since hashing a code object hashes its
        # contents; all code objects are kept alive, so that no id is used twice.
        self._indices: dict[int, dict[int, int] | None] = {}
        self._codes: list[CodeType] = []
        self._places: list[tuple[CodeType, int]] = []
        self._sites: list[Site] = []  # of the first places, as far as they were resolved
        self.last = NO_SITE  # the index that ``here`` returned last
        self.started = threading.local()  # ``line``: the line that started this thread, or its task

    def here(self, inner: int = 3) -> int:
        """The index of the stack's innermost watched line, or else of the line that started this thread, or NO_SITE.
        The ``inner`` innermost frames, this one included, are the tool's: none of them is looked at."""
        try:
            frame: Any = sys._getframe(inner)
        except ValueError:  # the call was made by a thread of torch's own
            frame = None
        known = self._indices
        try:
            while (indices := known[id(frame.f_code)]) is None:
                frame = frame.f_back
            self.last = index = indices[frame.f_lasti]
        except (KeyError, AttributeError):  # code or a place that is new, or no frame is left
            return self._searched(frame)
        return index

    def _searched(self, frame: FrameType | None) -> int:
        """What ``here`` returns for a stack that it does not know yet, from that frame on."""
        self.last = next(self._watched_from(frame), getattr(self.started, "line", NO_SITE))
        return self.last

    def callers(self, site: int) -> tuple[int, ...]:
        """The indices of the watched lines that have called the line ``site`` of this stack, the innermost first."""
        lines = dropwhile(lambda line: line != site, self._watched_from(sys._getframe(1)))
        return tuple(islice(lines, 1, 1 + _CALLERS))

    def _watched_from(self, frame: FrameType | None) -> Iterator[int]:
        """The indices of the watched lines of a stack, from that frame on."""
        while frame is not None:
            code, offset = frame.f_code, frame.f_lasti
            if id(code) not in self._indices:
                self._codes.append(code)
                self._indices[id(code)] = {} if self._is_watched(code) else None
            indices = self._indices[id(code)]
            if indices is not None:
                if offset not in indices:
                    indices[offset] = len(self._places)
                    self._places.append((code, offset))
                yield indices[offset]
            frame = frame.f_back

    def resolved(self) -> Sequence[Site]:
        """All lines so far, by index."""
        self._sites.extend(self._site(*place) for place in self._places[len(self._sites) :])
        return self._sites

    def _is_watched(self, code: CodeType) -> bool:
        paths = _paths(code.co_filename)
        if any(path.is_relative_to(own) for path in paths for own in _UNWATCHED):
            return False
        return any("site-packages" not in path.relative_to(root).parts for path, root in self._inside(code))

    def _inside(self, code: CodeType) -> Iterator[tuple[Path, Path]]:
        """The paths of the code's file that are in a watched folder, each with that folder."""
        for path in _paths(code.co_filename):
            yield from ((path, root) for root in self._watch if path.is_relative_to(root))

    def _site(self, code: CodeType, offset: int) -> Site:
        line = list(code.co_positions())[offset // 2][0] or code.co_firstlineno
        path, root = next(self._inside(code))
        name = path.relative_to(root.parent).as_posix()
        return Site(name, code.co_qualname, line, _statement(code.co_filename, line))


@cache
def _paths(filename: str) -> Sequence[Path]:
    """The file without links, and by its name, since a package in a watched folder may itself be a link."""
    path = Path(filename).absolute()
    return tuple(dict.fromkeys((path.resolve(), path)))


@cache
def _statement(filename: str, line: int) -> str:
    """The innermost statement at that line, joined to one line; of a compound statement only the head."""
    spans = [span for span in _spans(filename) if span[0] <= line <= span[1]]
    if not spans:
        return linecache.getline(filename, line).strip()
    first, last = min(spans, key=lambda span: (span[1] - span[0], -span[0]))
    return " ".join(" ".join(linecache.getline(filename, n) for n in range(first, last + 1)).split())


@cache
def _spans(filename: str) -> Sequence[tuple[int, int]]:
    """First and last line of every statement, without the bodies of compound statements."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ()
    return [_span(node) for node in _statements(tree)]


def _statements(parent: ast.AST) -> Iterator[ast.stmt]:
    """All statements within ``parent``, without a walk over their expressions."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(parent, block, ()):
            if isinstance(node, ast.stmt):
                yield node
            yield from _statements(node)


def _span(node: ast.stmt) -> tuple[int, int]:
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    return node.lineno, max(last, node.lineno)
