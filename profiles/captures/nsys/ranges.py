"""NVTX ranges and marks of an export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..capture import CapturedRange
from .tables import Tables, number, whole

EVENTS: Final = "NVTX_EVENTS"
_MARK, _PUSHED, _STARTED, _DOMAIN = 34, 59, 60, 75  # eventType
_COLUMNS: Final = ("eventType", "start", "end", "globalTid", "endGlobalTid", "domainId", "text", "textId")
_WHOLE: Final = ("int64Value", "uint64Value", "int32Value", "uint32Value")
_REAL: Final = ("doubleValue", "floatValue")
_PROCESS: Final = ~0xFFFFFF


def spans(tables: Tables, strings: Mapping[int, str]) -> list[CapturedRange]:
    """In order of time. Ranges that never closed, or closed on another thread, are left out."""
    domains = _domains(tables, strings)
    rows = tables.rows(EVENTS, (*_COLUMNS, *_WHOLE, *_REAL))
    found = (_span(row, strings, domains) for row in rows if row[0] in (_MARK, _PUSHED, _STARTED))
    return sorted(filter(None, found), key=lambda span: (span.start, -span.end))


def stream_names(tables: Tables, strings: Mapping[int, str], process: int) -> Iterator[tuple[int, str]]:
    """The streams that the program named with NVTX."""
    table = "TARGET_INFO_NVTX_CUDA_STREAM"
    for stream, name, name_id in tables.rows(table, ("streamId", "name", "nameId"), {"processId": process}):
        text = name if isinstance(name, str) else strings.get(name if name_id is None else name_id, "")
        if isinstance(stream, int) and text:
            yield stream, text


def _domains(tables: Tables, strings: Mapping[int, str]) -> dict[tuple[int, Any], str]:
    """Names of domains by process and number."""
    rows = tables.rows(EVENTS, ("eventType", "globalTid", "domainId", "text", "textId"))
    return {
        (number(thread) & _PROCESS, domain): _message(text, text_id, strings)
        for kind, thread, domain, text, text_id in rows
        if kind == _DOMAIN
    }


def _span(
    row: tuple[Any, ...], strings: Mapping[int, str], domains: Mapping[tuple[int, Any], str]
) -> CapturedRange | None:
    kind, start, end, thread, end_thread, domain, text, text_id, *payload = row
    elsewhere = kind == _STARTED and end_thread not in (None, 0, thread)
    if elsewhere or (end is None and kind != _MARK):
        return None
    begin = whole(start, f"{EVENTS}.start")
    return CapturedRange(
        name=_message(text, text_id, strings),
        start=begin,
        end=begin if kind == _MARK else max(whole(end, f"{EVENTS}.end"), begin),
        thread=number(thread),
        domain=domains.get((number(thread) & _PROCESS, domain), ""),
        payload=_payload(payload),
    )


def _message(text: object, text_id: object, strings: Mapping[int, str]) -> str:
    """The text, or the registered string of its number."""
    if isinstance(text, str):
        return text
    return strings.get(text_id, "") if isinstance(text_id, int) else ""


def _payload(values: list[Any]) -> int | None:
    """The payload. Its column depends on its type in the program."""
    for value in values:
        if isinstance(value, int):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    return None
