"""Which source line of the watched code made a call, cheaply; what it says, only when asked."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from ..timeline import NO_SITE, Site


class Sites:
    """Source lines by small index, in the order in which they were first met.

    A line counts when its file lies under one of ``watch`` (folders or files); files are named relative to the
    watched folder's parent.
    """

    def __init__(self, watch: Sequence[Path]) -> None:
        self._watch = tuple(path.resolve() for path in watch)
        # By id, for hashing a code object hashes its contents; kept alive by being in the value.
        self._watched: dict[int, tuple[CodeType, bool]] = {}
        self._index: dict[tuple[int, int], int] = {}
        self._places: list[tuple[CodeType, int]] = []

    def here(self) -> int:
        """The index of the innermost watched line around a launch, or NO_SITE.

        The three innermost frames are the device's own.
        """
        frame: FrameType | None = sys._getframe(3)
        watched = self._watched
        while frame is not None:
            code = frame.f_code
            known = watched.get(id(code))
            if known is None:
                known = watched[id(code)] = (code, self._is_watched(code))
            if known[1]:
                key = (id(code), frame.f_lasti)
                index = self._index.get(key)
                return self._place(key, code) if index is None else index
            frame = frame.f_back
        return NO_SITE

    def resolved(self) -> Sequence[Site]:
        return [self._site(code, offset) for code, offset in self._places]

    def _place(self, key: tuple[int, int], code: CodeType) -> int:
        index = self._index[key] = len(self._places)
        self._places.append((code, key[1]))
        return index

    def _is_watched(self, code: CodeType) -> bool:
        path = Path(code.co_filename).resolve()
        return any(path.is_relative_to(root) for root in self._watch)

    def _site(self, code: CodeType, offset: int) -> Site:
        line = list(code.co_positions())[offset // 2][0] or code.co_firstlineno
        path = Path(code.co_filename).resolve()
        root = next(root for root in self._watch if path.is_relative_to(root))
        name = path.relative_to(root.parent).as_posix()
        return Site(name, code.co_qualname, line, _statement(code.co_filename, line))


def _statement(filename: str, line: int) -> str:
    """The innermost statement at that line, on one line; of a compound one, its head."""
    spans = [span for span in _spans(filename) if span[0] <= line <= span[1]]
    if not spans:
        return linecache.getline(filename, line).strip()
    first, last = min(spans, key=lambda span: (span[1] - span[0], -span[0]))
    return " ".join(" ".join(linecache.getline(filename, n) for n in range(first, last + 1)).split())


@cache
def _spans(filename: str) -> Sequence[tuple[int, int]]:
    """First and last line of every statement's own text, bodies excluded."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ()
    return [_span(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def _span(node: ast.stmt) -> tuple[int, int]:
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    return node.lineno, max(last, node.lineno)
