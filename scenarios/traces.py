"""Readers of recorded traffic, one record at a time, in the formats of the field.

mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids (one for every 512 prompt tokens)
azure      CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens
burstgpt   CSV: Timestamp (s), Request tokens, Response tokens
sharegpt   a JSON array of conversations; their first two turns become a request. The text is not tokenized:
           four bytes of UTF-8 count as one token, which is about right for English
jsonl      JSON lines: prompt_token_ids or input_length, output_length, and where given timestamp (ms), sampling

Requests that produced nothing, and conversations without an answer, are left out.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import ValidationError

from .document import scalar
from .json_array import objects
from .problems import show
from .prompts import BLOCK
from .records import MAX_TOKENS, RecordFields, TraceError, TraceLine, TraceRecord, lines
from .workload_schema import Sampling

Format = Literal["mooncake", "azure", "burstgpt", "sharegpt", "jsonl"]
Reader = Callable[[BinaryIO, str], Iterator[TraceRecord]]

_MILLISECOND = 10**6
_SECOND = 10**9
_BYTES_PER_TOKEN = 4
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?(Z|[+-]\d\d:\d\d)?", re.ASCII)


def read(path: Path, form: Format, *, limit: int | None = None) -> Iterator[TraceRecord]:
    """The first ``limit`` requests of a trace, or all. Raises TraceError."""
    with _open(path) as file:
        yield from islice(parse(file, form, name=str(path)), limit)


def parse(file: BinaryIO, form: Format, *, name: str) -> Iterator[TraceRecord]:
    """The requests of an open trace, which errors call ``name``. Raises TraceError."""
    return _READERS[form](file, name)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:
        raise TraceError(
            str(path), 1, f"cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None


def _mooncake(file: BinaryIO, name: str) -> Iterator[TraceRecord]:
    for row in _json_lines(file, name):
        length = row.count("input_length", minimum=1)
        hash_ids = row.ids("hash_ids", below=2**63)
        blocks = -(-length // BLOCK)
        if len(hash_ids) != blocks:
            raise row.line.error(f"hash_ids: expected {blocks} for {length} tokens, got {len(hash_ids)}")
        arrival = row.instant("timestamp", unit=_MILLISECOND)
        if output := row.count("output_length", minimum=0):
            yield TraceRecord(row.line.number, length, output, arrival, hash_ids=tuple(hash_ids))


def _azure(file: BinaryIO, name: str) -> Iterator[TraceRecord]:
    for row in _csv(file, name, columns=("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        prompt = row.count("ContextTokens", minimum=1)
        arrival = _date(row, "TIMESTAMP")
        if output := row.count("GeneratedTokens", minimum=0):
            yield TraceRecord(row.line.number, prompt, output, arrival)


def _burstgpt(file: BinaryIO, name: str) -> Iterator[TraceRecord]:
    for row in _csv(file, name, columns=("Timestamp", "Request tokens", "Response tokens")):
        prompt = row.count("Request tokens", minimum=0)
        output = row.count("Response tokens", minimum=0)
        arrival = row.instant("Timestamp", unit=_SECOND)
        if prompt and output:
            yield TraceRecord(row.line.number, prompt, output, arrival)


def _sharegpt(file: BinaryIO, name: str) -> Iterator[TraceRecord]:
    for line, conversation in objects(file, name):
        turns = conversation.get("conversations", conversation.get("conversation"))
        if not isinstance(turns, list):
            raise line.error(f"conversations: expected a list of turns, got {show(turns)}")
        prompt, output = ([_spoken(turn, line) for turn in turns[:2]] + [0, 0])[:2]
        if prompt and output:
            yield TraceRecord(line.number, prompt, output)


def _jsonl(file: BinaryIO, name: str) -> Iterator[TraceRecord]:
    for row in _json_lines(file, name):
        ids = row.ids("prompt_token_ids", below=2**31) if "prompt_token_ids" in row.fields else None
        if ids is not None and not 1 <= len(ids) <= MAX_TOKENS:
            raise row.line.error(f"prompt_token_ids: expected 1 to {MAX_TOKENS} of them, got {len(ids)}")
        yield TraceRecord(
            row.line.number,
            row.count("input_length", minimum=1) if ids is None else len(ids),
            row.count("output_length", minimum=1),
            row.instant("timestamp", unit=_MILLISECOND) if "timestamp" in row.fields else None,
            prompt_ids=ids,
            sampling=_sampling(row) if "sampling" in row.fields else None,
        )


_READERS: dict[Format, Reader] = {
    "mooncake": _mooncake,
    "azure": _azure,
    "burstgpt": _burstgpt,
    "sharegpt": _sharegpt,
    "jsonl": _jsonl,
}


def _json_lines(file: BinaryIO, name: str) -> Iterator[RecordFields]:
    for line, text in lines(file, name):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise line.error(f"not JSON: {getattr(error, 'msg', error)}") from None
        if not isinstance(value, dict):
            raise line.error(f"expected a JSON object, got {show(value)}")
        yield RecordFields(line, value)


def _csv(file: BinaryIO, name: str, *, columns: Sequence[str]) -> Iterator[RecordFields]:
    """Rows under a header that has at least ``columns``; numbers are converted."""
    header: list[str] = []
    for line, text in lines(file, name):
        cells = _cells(line, text)
        if not header:
            header = [cell.strip() for cell in cells]
            if missing := [column for column in columns if column not in header]:
                raise line.error(
                    f"expected a header with {', '.join(columns)}; missing: {', '.join(missing)}"
                )
        elif len(cells) != len(header):
            raise line.error(f"expected {len(header)} cells, got {len(cells)}")
        else:
            yield RecordFields(
                line, {column: scalar(cell.strip()) for column, cell in zip(header, cells, strict=True)}
            )


def _cells(line: TraceLine, text: str) -> list[str]:
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise line.error(f"not CSV: {error}") from None


def _date(row: RecordFields, name: str) -> int:
    """A date and time as ns of its epoch; the fraction is kept to the nanosecond."""
    match = _DATE.fullmatch(str(row.fields[name]))
    try:
        day, time, fraction, zone = match.groups() if match else ("", "", "", "")
        seconds = datetime.fromisoformat(f"{day}T{time}{zone or '+00:00'}").timestamp()
    except (ValueError, OverflowError):
        raise row.error(name, "a date and time such as 2023-11-16 18:15:46.6805900") from None
    return round(seconds) * _SECOND + int((fraction or "").ljust(9, "0"))


def _spoken(turn: Any, line: TraceLine) -> int:
    """The tokens of one turn, by its bytes."""
    text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
    if not isinstance(text, str):
        raise line.error("conversations: expected turns with a value or content of text")
    return -(-len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN)


def _sampling(row: RecordFields) -> Sampling:
    try:
        return Sampling.model_validate(row.fields["sampling"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("sampling", *first["loc"])))
        raise row.line.error(f"{where}: {first['msg'].lower()}, got {show(first['input'])}") from None
