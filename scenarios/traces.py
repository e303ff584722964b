"""Readers of recorded traffic, one record at a time, in the formats of the field.

mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids (one for every 512 prompt tokens)
azure      CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens
burstgpt   CSV: Timestamp (s), Request tokens, Response tokens
sharegpt   a JSON array of conversations; the texts of their first two turns are a request's prompt and output. Their
           tokens are counted by the tokenizer.json in the folder of model.path, without a chat template. Where there
           is none, n bytes of UTF-8 count as n / 4 tokens, rounded up. That is about right for English under
           vocabularies of 32,000 to 128,000 tokens; code and other scripts deviate by a factor of up to two or three.
           Only the numbers of tokens are used: prompts have random ids
jsonl      JSON lines: prompt_token_ids or input_length, output_length, and where given timestamp (ms), sampling

Requests without prompt or output, and conversations without an answer, are left out and counted. Malformed records are
reported together, up to ``MAX_ERRORS`` and then their number.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from pydantic import ValidationError

from .document import scalar
from .problems import dotted, show
from .records import BLOCK, MAX_TOKENS, TraceError, TraceErrors, TraceLine, TraceRecord, lines, objects
from .schema import Scenario
from .workload_schema import Sampling, TraceFormat

TokenCount = Callable[[str], int]
Rows = Callable[[BinaryIO, str, TraceErrors], Iterator[TraceLine]]
"""(file, its name in errors, the errors so far) to its records; malformed ones become errors."""

TOKENIZER: Final = "tokenizer.json"
_BYTES_PER_TOKEN: Final = 4
_MILLISECOND = 10**6
_SECOND = 10**9
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?(Z|[+-]\d\d:\d\d)?", re.ASCII)


def estimated(text: str) -> int:
    return -(-len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN)


def tokenizer_file(scenario: Scenario) -> Path | None:
    """The tokenizer in the model's folder, if the scenario's trace holds text and the folder has one."""
    folder = scenario.file("model", "path")
    if folder is None or scenario.workload.format != "sharegpt":
        return None
    file = folder / TOKENIZER
    return file if file.is_file() else None


def token_count(file: Path | None) -> TokenCount:
    """Counts a text's tokens by the tokenizer in ``file``, without the special tokens of a chat; by ``estimated`` for
    None. Raises LookupError where the library is missing or does not read the file."""
    if file is None:
        return estimated
    if find_spec("tokenizers") is None:
        raise LookupError(f"{TOKENIZER} counts the tokens of texts: pip install 'schedbench[tokenizer]'")
    tokenizer = _loaded(file.resolve(), file.stat().st_mtime_ns)

    def count(text: str) -> int:
        plain = text.encode("utf-8", "replace").decode()  # the library refuses lone surrogates
        return len(tokenizer.encode(plain, add_special_tokens=False).ids)

    return count


@lru_cache(maxsize=4)
def _loaded(file: Path, changed: int) -> Any:  # noqa: ARG001
    try:
        tokenizer = import_module("tokenizers").Tokenizer.from_file(str(file))
    except Exception as error:  # the library's own errors have no other class in common
        raise LookupError(f"{TOKENIZER} is no tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class TraceContent(NamedTuple):
    """``left_out`` records have no prompt or no output."""

    records: list[TraceRecord]
    left_out: int


def read(
    path: Path, form: TraceFormat, *, limit: int | None = None, tokens: TokenCount = estimated
) -> TraceContent:
    """The first ``limit`` requests of a trace, or all. ``tokens`` counts those of a text. Raises TraceError."""
    with _open(path) as file:
        return parse(file, form, name=str(path), limit=limit, tokens=tokens)


def parse(
    file: BinaryIO, form: TraceFormat, *, name: str, limit: int | None = None, tokens: TokenCount = estimated
) -> TraceContent:
    """The first ``limit`` requests of an open trace, which errors call ``name``, or all. Raises TraceError with
    everything that is wrong up to there."""
    rows, record_of = _formats(tokens)[form]
    errors = TraceErrors()
    records: list[TraceRecord] = []
    left_out = 0
    with errors:  # one of ``rows`` itself ends the reading
        for row in rows(file, name, errors):
            with errors:
                record = record_of(row)
                if record is None:
                    left_out += 1
                else:
                    records.append(record)
            if errors.full or len(records) == limit:
                break
    if errors.count:
        raise errors.joined()
    return TraceContent(records, left_out)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:
        raise TraceError(
            str(path), 1, f"cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None


def _mooncake(row: TraceLine) -> TraceRecord | None:
    length = row.count("input_length", minimum=1)
    hash_ids = row.ids("hash_ids", below=2**63)
    blocks = -(-length // BLOCK)
    if len(hash_ids) != blocks:
        raise row.error(f"hash_ids: expected {blocks} for a length of {length}, got {len(hash_ids)}")
    arrival = row.instant("timestamp", unit=_MILLISECOND)
    output = row.count("output_length", minimum=0)
    return TraceRecord(row.number, length, output, arrival, hash_ids=tuple(hash_ids)) if output else None


def _azure(row: TraceLine) -> TraceRecord | None:
    prompt = row.count("ContextTokens", minimum=1)
    arrival = _date(row, "TIMESTAMP")
    output = row.count("GeneratedTokens", minimum=0)
    return TraceRecord(row.number, prompt, output, arrival) if output else None


def _burstgpt(row: TraceLine) -> TraceRecord | None:
    prompt = row.count("Request tokens", minimum=0)
    output = row.count("Response tokens", minimum=0)
    arrival = row.instant("Timestamp", unit=_SECOND)
    return TraceRecord(row.number, prompt, output, arrival) if prompt and output else None


def _sharegpt(tokens: TokenCount, row: TraceLine) -> TraceRecord | None:
    turns = row.fields.get("conversations", row.fields.get("conversation"))
    if not isinstance(turns, list):
        raise row.error(f"conversations: expected a list of turns, got {show(turns)}")
    prompt, output = ([tokens(_text(turn, row)) for turn in turns[:2]] + [0, 0])[:2]
    return TraceRecord(row.number, prompt, output) if prompt and output else None


def _jsonl(row: TraceLine) -> TraceRecord:
    ids = row.ids("prompt_token_ids", below=2**31) if "prompt_token_ids" in row.fields else None
    if ids is not None and not 1 <= len(ids) <= MAX_TOKENS:
        raise row.error(f"prompt_token_ids: expected 1 to {MAX_TOKENS} of them, got {len(ids)}")
    return TraceRecord(
        row.number,
        row.count("input_length", minimum=1) if ids is None else len(ids),
        row.count("output_length", minimum=1),
        row.instant("timestamp", unit=_MILLISECOND) if "timestamp" in row.fields else None,
        prompt_ids=ids,
        sampling=_sampling(row) if "sampling" in row.fields else None,
    )


def _json_lines(file: BinaryIO, name: str, errors: TraceErrors) -> Iterator[TraceLine]:
    for line, text in lines(file, name, errors):
        with errors:
            yield _json_object(line, text)


def _json_object(line: TraceLine, text: str) -> TraceLine:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise line.error(f"not JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(value, dict):
        raise line.error(f"expected a JSON object, got {show(value)}")
    return replace(line, fields=value)


def _csv(file: BinaryIO, name: str, errors: TraceErrors, *, columns: Sequence[str]) -> Iterator[TraceLine]:
    """Rows under a header that has at least ``columns``; numbers are converted. An invalid header ends the reading."""
    header: list[str] = []
    for line, text in lines(file, name, errors):
        if not header:
            header = [cell.strip() for cell in _cells(line, text)]
            if missing := [column for column in columns if column not in header]:
                raise line.error(
                    f"expected a header with {', '.join(columns)}; missing: {', '.join(missing)}"
                )
        else:
            with errors:
                yield _csv_row(line, text, header)


def _csv_row(line: TraceLine, text: str, header: Sequence[str]) -> TraceLine:
    cells = _cells(line, text)
    if len(cells) != len(header):
        raise line.error(f"expected {len(header)} cells, got {len(cells)}")
    return replace(
        line, fields={column: scalar(cell.strip()) for column, cell in zip(header, cells, strict=True)}
    )


def _cells(line: TraceLine, text: str) -> list[str]:
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise line.error(f"not CSV: {error}") from None


def _date(row: TraceLine, name: str) -> int:
    """A date and time as ns of its epoch; the fraction is kept to the nanosecond."""
    match = _DATE.fullmatch(str(row.fields[name]))
    try:
        day, time, fraction, zone = match.groups() if match else ("", "", "", "")
        seconds = datetime.fromisoformat(f"{day}T{time}{zone or '+00:00'}").timestamp()
    except (ValueError, OverflowError):
        raise row.unexpected(name, "a date and time such as 2023-11-16 18:15:46.6805900") from None
    return round(seconds) * _SECOND + int((fraction or "").ljust(9, "0"))


def _text(turn: Any, line: TraceLine) -> str:
    text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
    if not isinstance(text, str):
        raise line.error("conversations: expected turns with a value or content of text")
    return text


def _sampling(row: TraceLine) -> Sampling:
    try:
        return Sampling.model_validate(row.fields["sampling"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = dotted(("sampling", *first["loc"]))
        raise row.error(f"{where}: {first['msg'].lower()}, got {show(first['input'])}") from None


def _formats(
    tokens: TokenCount,
) -> dict[TraceFormat, tuple[Rows, Callable[[TraceLine], TraceRecord | None]]]:
    return {
        "mooncake": (_json_lines, _mooncake),
        "azure": (partial(_csv, columns=("TIMESTAMP", "ContextTokens", "GeneratedTokens")), _azure),
        "burstgpt": (partial(_csv, columns=("Timestamp", "Request tokens", "Response tokens")), _burstgpt),
        "sharegpt": (objects, partial(_sharegpt, tokens)),
        "jsonl": (_json_lines, _jsonl),
    }
