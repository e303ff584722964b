"""Finds every place in sched/ that orders streams or keeps memory allocated, by its syntax, and makes a copy of sched/
without it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from schedbench.profiles.check.unproven import ORDERING_CALLS, statements

Kind = Literal["wait", "event", "reference", "copy", "context", "pinned", "asynchronous"]

# Calls that are whole statements, by their purpose.
STATEMENTS: dict[str, Kind] = {
    **ORDERING_CALLS,
    **dict.fromkeys(("barrier", "reads_done"), "wait"),
    "mark_read": "event",
    "keep_alive": "reference",
    **dict.fromkeys(("enter_context", "read_tables", "copy_tables", "copy_pages"), "copy"),
}
# Calls that can be replaced by their receiver or only argument.
COPIES = {"clone", "copy", "copy_for_forward", "zeros_like"}
EVENTS = {"copy_done", "read_done"}
# Deliberate faults, each of which has its own test.
LEFT_OUT = {"sched/relay/broken.py", "sched/relay/faults.py"}
PLAIN = '__import__("contextlib").nullcontext()'


@dataclass(frozen=True, slots=True)
class Place:
    """``first`` to ``last`` are the lines of the statement around it; ``start`` and ``end`` are bytes of the file."""

    file: str
    line: int
    first: int
    last: int
    function: str
    kind: Kind
    start: int
    end: int
    was: str
    becomes: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.was} -> {self.becomes or 'nothing'}"

    def mutated(self, source: bytes) -> bytes:
        """``source`` with this one place changed and every line where it was."""
        becomes = self.becomes.encode()
        lines = b"\n" * (source[self.start : self.end].count(b"\n") - becomes.count(b"\n"))
        return source[: self.start] + becomes + lines + source[self.end :]


class Found:
    """The places that a rule finds in one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.places: list[Place] = []
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def add(
        self, node: ast.expr | ast.stmt, around: ast.stmt, function: str, kind: Kind, becomes: str
    ) -> None:
        start, end = self._span(node)
        was = " ".join(self.source[start:end].decode().split())
        first, last = around.lineno, _end_of_header(around)
        self.places.append(
            Place(self.file, node.lineno, first, last, function, kind, start, end, was, becomes)
        )

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )


Rule = Callable[[Found, ast.stmt, str], None]


def places(root: Path) -> list[Place]:
    """Returns all places, file by file and line by line."""
    found: list[Place] = []
    for path in sorted((root / "sched").rglob("*.py")):
        file = path.relative_to(root).as_posix()
        if file not in LEFT_OUT:
            found += places_of(file, path.read_bytes())
    return found


def places_of(file: str, source: bytes) -> list[Place]:
    found = Found(file, source)
    for statement, qualified in statements(ast.parse(source)):
        for rule in RULES:
            rule(found, statement, qualified.rpartition(".")[2] or "module")
    return sorted(found.places, key=lambda place: (place.start, place.end))


def _end_of_header(statement: ast.stmt) -> int:
    """Returns the last line of a statement itself, without the statements in it."""
    body = getattr(statement, "body", None)
    if body:
        return max(statement.lineno, int(body[0].lineno) - 1)
    return statement.end_lineno or statement.lineno


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yields the expressions of the statement itself, without those of statements in it."""
    waiting: list[ast.AST] = [c for c in ast.iter_child_nodes(statement) if not isinstance(c, ast.stmt)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr):
            yield node
        waiting += [c for c in ast.iter_child_nodes(node) if not isinstance(c, ast.stmt)]


def _called(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Call):
        return ""
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


# ---- rules -----------------------------------------------------------------------------------------------------


def _statement_calls(found: Found, statement: ast.stmt, function: str) -> None:
    """An event is recorded without arguments, a tensor with the stream that it is used on."""
    match statement:
        case ast.Expr(value=ast.Call(args=given) as call) if _called(call) == "record":
            found.add(statement, statement, function, "reference" if given else "event", "pass")
        case ast.Expr(value=ast.Call() as call) if _called(call) in STATEMENTS:
            found.add(statement, statement, function, STATEMENTS[_called(call)], "pass")


def _copies(found: Found, statement: ast.stmt, function: str) -> None:
    """A copy is replaced by the original; a new tensor by a change of the old one."""
    for node in _expressions(statement):
        if not isinstance(node, ast.Call) or node.keywords or _called(node) not in COPIES:
            continue
        if len(node.args) == 1:
            found.add(node, statement, function, "copy", found.text(node.args[0]))
        elif not node.args and isinstance(node.func, ast.Attribute):
            found.add(node, statement, function, "copy", found.text(node.func.value))
    match statement:
        case ast.Assign(
            targets=[ast.Attribute() as target], value=ast.BinOp(left=left, op=ast.Add(), right=right)
        ):
            if found.text(left) == found.text(target):
                added = found.text(right)
                found.add(statement, statement, function, "copy", f"{found.text(target)} += {added}")


def _contexts(found: Found, statement: ast.stmt, function: str) -> None:
    """A stream, or a forward's own copy, that is entered; and the single place that enters streams."""
    if isinstance(statement, ast.With):
        for item in statement.items:
            name = _called(item.context_expr)
            if name == "on" or "isolate" in name:
                found.add(item.context_expr, statement, function, "context", PLAIN)
    for node in _expressions(statement):
        if _called(node) == "stream":
            found.add(node, statement, function, "context", PLAIN)


def _events(found: Found, statement: ast.stmt, function: str) -> None:
    match statement:
        case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Call() as made) if name in EVENTS:
            found.add(made, statement, function, "event", "None")


def _references(found: Found, statement: ast.stmt, function: str) -> None:
    """The references put into a ring, and the number of launches that a ring holds."""
    match statement:
        case ast.Assign(
            targets=[ast.Subscript(value=ast.Attribute(attr="kept_alive"))], value=ast.List(elts=held)
        ):
            found.add(statement, statement, function, "reference", "pass")
            for element in held:
                found.add(element, statement, function, "reference", "*()")
        case ast.AugAssign(target=ast.Attribute(attr="extra_keep_alive_refs")):
            found.add(statement, statement, function, "reference", "pass")
        case ast.AnnAssign(target=ast.Name(id="kept_alive")):
            lists = [n for n in _expressions(statement) if isinstance(n, ast.List) and len(n.elts) > 1]
            for made in lists:
                found.add(made.elts[-1], statement, function, "reference", "*()")


def _host_memory(found: Found, statement: ast.stmt, function: str) -> None:
    """Pinned staging becomes pageable; an asynchronous copy to the host becomes blocking, and the other way round."""
    for node in _expressions(statement):
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if _called(node) == "pin_memory" and isinstance(node.func, ast.Attribute):
            found.add(node, statement, function, "pinned", found.text(node.func.value))
        if "pin_memory" in given:
            found.add(given["pin_memory"], statement, function, "pinned", "False")
        if _called(node) == "cpu" and isinstance(node.func, ast.Attribute):
            late = f'{found.text(node.func.value)}.to("cpu", non_blocking=True)'
            found.add(node, statement, function, "asynchronous", late)
        if "non_blocking" in given and node.args and ast.unparse(node.args[0]) == "'cpu'":
            found.add(given["non_blocking"], statement, function, "asynchronous", "False")
        if "non_blocking" in given and not isinstance(given["non_blocking"], ast.Constant):
            found.add(given["non_blocking"], statement, function, "asynchronous", "True")


RULES: tuple[Rule, ...] = (_statement_calls, _copies, _contexts, _events, _references, _host_memory)
