"""The waits, events and references of sched/, found by their syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ..record.timeline import OrderKind

# Calls of streams, events, links and tensors that order. ``record`` has no arguments where it is an event's.
ORDERING_CALLS: Mapping[str, OrderKind] = MappingProxyType(
    {
        **dict.fromkeys(("wait", "wait_stream", "wait_event", "synchronize", "flush"), "wait"),
        "record_event": "event",
        "record_stream": "reference",
    }
)
# What a launch keeps, and what a worker adds to it.
KEPT = ("kept_alive", "extra_keep_alive_refs")


class Place(NamedTuple):
    """``function`` is the qualified name; ``first`` to ``last`` are the statement's lines."""

    kind: OrderKind
    file: str
    function: str
    first: int
    last: int
    statement: str


def places(sched: Path) -> Iterator[Place]:
    """Those in the folder ``sched``, file by file."""
    for path in sorted(sched.rglob("*.py")):
        source = path.read_text()
        for statement, function in statements(ast.parse(source)):
            kind = ordering_kind(statement)
            if kind is not None:
                file = path.relative_to(sched.parent).as_posix()
                last = statement.end_lineno or statement.lineno
                text = " ".join((ast.get_source_segment(source, statement) or "").split())
                yield Place(kind, file, function, statement.lineno, last, text)


def statements(node: ast.AST, function: str = "") -> Iterator[tuple[ast.stmt, str]]:
    """All statements below the node, each with the qualified name of the function or class around it."""
    for child in ast.iter_child_nodes(node):
        within = function
        if isinstance(child, ast.stmt):
            yield child, function
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            within = f"{function}.{child.name}" if function else child.name
        yield from statements(child, within)


def ordering_kind(statement: ast.stmt) -> OrderKind | None:
    """What the statement orders by, if it is a wait, an event's recording or a reference that is kept."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="record"), args=given)):
            return "reference" if given else "event"
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="wait", value=receiver))) if _is_link(receiver):
            return None  # for a message, not for work of the device
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return ORDERING_CALLS.get(name)
        case (
            ast.Assign(targets=[ast.Subscript(value=ast.Attribute(attr=name))])
            | ast.AugAssign(target=ast.Attribute(attr=name))
        ) if name in KEPT:
            return "reference"
    return None


def _is_link(receiver: ast.expr) -> bool:
    return ast.unparse(receiver).rpartition(".")[2].strip("_") == "link"
