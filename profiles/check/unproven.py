"""The waits, events and references that a check does not prove: without one of them, all of its runs would be the same.

A run that is watched for hazards finds which of the lines that it executes are needed. References that a launch keeps
are needed if a run without them shows a hazard.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from ... import sched
from ...sched.batch import ScheduleBatch, StepResult
from ...sched.relay import ordering
from ...sched.relay.context import RelayContext
from ...sched.relay.faults import Fault
from ..platform.pool import MapFunction
from ..platform.resolve import Resolved, row_mode
from ..ranks.execute import Options
from ..record.result import Abstained, Hazards, Result, SitePart
from ..record.timeline import OrderKind
from ..run.crash import Crash
from .report import Unproven
from .runs import attempt, with_section

HazardsOrCrash = Hazards | Abstained | Crash
_Policy = tuple[str, str]  # file, qualified name

RELAY = "sched/relay/"  # its files hold the policies of all states
BROKEN = f"{RELAY}broken.py"  # wrong policies, which only faults put into a row
# What a launch keeps, and what a worker adds to it.
KEPT = ("kept_alive", "extra_keep_alive_refs")
RING, EXTRA = KEPT

_FEW = 8  # requests

NOT_EXECUTED = "not executed"
NOT_NEEDED = "executed, but no two accesses depend on it alone"


def unproven(
    question: Resolved, result: Result, without: Mapping[str, Iterable[HazardsOrCrash | None]]
) -> Sequence[Unproven]:
    """Those of the running configuration: of the relay's policies, and of all other files in which the run orders
    something. ``result`` is of a run that was watched for hazards, ``without`` from ``without_references``. Raises
    MachineError."""
    mode, relay = row_mode(question.scenario), question.relay
    policies = {*_places_of(relay.row(**mode)), *_places_of(relay.draft_row(mode["speculation"]))}
    found: list[Unproven] = [
        *(Unproven(row.kind, row.site, NOT_NEEDED) for row in result.ordering if not row.needed),
        *_not_executed(result, policies),
        *_not_kept({name: any(x != result.hazards for x in found) for name, found in without.items()}),
    ]
    proper = (entry for entry in found if entry.site.file != BROKEN)
    return sorted(proper, key=lambda entry: (entry.site.file, entry.site.line))


def _not_executed(result: Result, policies: set[_Policy]) -> Iterator[Unproven]:
    executed = {(row.site.file, row.site.line) for row in result.ordering}
    files = {file for file, _ in executed if not file.startswith(RELAY)}
    for place in _places():
        is_configured = place.site.file in files or any(_is_of(place, policy) for policy in policies)
        lines = {(place.site.file, line) for line in range(place.site.line, place.last + 1)}
        if is_configured and not lines & executed and not _keeps(place):
            yield Unproven(place.kind, place.site, NOT_EXECUTED)


# ---- references that a launch keeps ----------------------------------------------------------------------------


def _not_kept(needed: Mapping[str, bool]) -> Iterator[Unproven]:
    for place in _places():
        if not needed.get(_keeps(place), True):
            yield Unproven(place.kind, place.site, NOT_NEEDED)


def without_references(
    question: Resolved, each: MapFunction
) -> Mapping[str, Iterable[HazardsOrCrash | None]]:
    """By a field of ``KEPT`` that the configuration uses, the hazards of a run without those references, or None if
    they are needed in any case. Where ``each`` maps over other processes, the runs begin at once."""
    mode = row_mode(question.scenario)
    if question.relay.row(**mode).keep_alive is not ordering.keep_in_ring:
        return {}
    names = KEPT if mode["speculation"] == "v2" else (RING,)
    return {name: each(partial(_hazards_without, question), (name,)) for name in names}


def _hazards_without(question: Resolved, name: str) -> HazardsOrCrash | None:
    """None where few of the requests show that the references are needed, which takes shorter runs."""
    keep = ordering.keep_nothing if name == RING else _keep_without_extra
    without = Fault("", "", "", (), (), lambda row: replace(row, keep_alive=keep))
    relay = question.relay
    changed = replace(relay, faults=(*relay.faults, without))
    few = with_section(question, "workload", requests=_FEW)
    many = (question.scenario.workload.requests or 0) > _FEW
    if many and _hazards(few.with_relay(changed)) != _hazards(few):
        return None
    return _hazards(question.with_relay(changed))


def _hazards(question: Resolved) -> HazardsOrCrash:
    result = attempt(question, Options(device="vgpu", hazards=True, counted=False))
    return result if isinstance(result, Crash) else result.hazards


def _keep_without_extra(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    result.extra_keep_alive_refs.clear()
    ordering.keep_in_ring(context, batch, result)


def _keeps(place: Place) -> str:
    """The field that keeps references, if the place stores some."""
    return next(
        (name for name in KEPT if place.kind == "reference" and f".{name}" in place.site.statement), ""
    )


# ---- where places are -------------------------------------------------------------------------------------------


def _places_of(row: Any) -> Iterator[_Policy]:
    """File and qualified name of each policy of a row; None has none."""
    for field in fields(row) if row is not None else ():
        policy = getattr(row, field.name)
        name = getattr(policy, "__qualname__", "")
        if name:
            yield policy.__module__.partition(".")[2].replace(".", "/") + ".py", name


def _is_of(place: Place, policy: _Policy) -> bool:
    file, name = policy
    return place.site.file == file and f"{place.site.function}.".startswith(f"{name}.")


@cache
def _places() -> Sequence[Place]:
    return list(places(Path(sched.__path__[0])))


# Calls of streams, events, links and tensors that order. ``record`` has no arguments where it is an event's.
ORDERING_CALLS: Mapping[str, OrderKind] = {
    **dict.fromkeys(("wait", "wait_stream", "wait_event", "synchronize", "flush"), "wait"),
    "record_event": "event",
    "record_stream": "reference",
}


class Place(NamedTuple):
    """A statement by its first line, and its ``last`` line."""

    kind: OrderKind
    site: SitePart
    last: int


def places(sched: Path) -> Iterator[Place]:
    """Those in the folder ``sched``, file by file."""
    for path in sorted(sched.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for statement, function in statements(ast.parse(source)):
            kind = ordering_kind(statement)
            if kind is not None:
                file, line = path.relative_to(sched.parent).as_posix(), statement.lineno
                text = " ".join((ast.get_source_segment(source, statement) or "").split())
                site = SitePart(file=file, function=function, line=line, statement=text)
                yield Place(kind, site, statement.end_lineno or line)


def statements(node: ast.AST, function: str = "") -> Iterator[tuple[ast.stmt, str]]:
    """All statements below the node, each with the qualified name of the function or class around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # holds no statement
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
