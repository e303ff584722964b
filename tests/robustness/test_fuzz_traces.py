"""Traces: any bytes are records, or refused with their line."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedbench.scenarios.records import MAX_TOKENS, TraceError
from schedbench.scenarios.traces import parse, read
from schedbench.scenarios.workload_schema import TraceFormat
from tests.robustness.hostile import VALUES, as_json, mutated, refuses_cleanly, rounds, spliced
from tests.scenarios.test_traces import TEXTS

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("little_memory")]

FORMATS = get_args(TraceFormat)
TABLES = ("azure", "burstgpt")
CELLS = VALUES.map(str) | st.text(max_size=10)
DEEP = b"[" * 100_000


def assert_parses_or_refuses(form: TraceFormat, content: bytes) -> None:
    """Records that are returned can be used in a run."""
    with refuses_cleanly(TraceError):
        try:
            found = parse(io.BytesIO(content), form, name="t").records
        except TraceError as refused:
            assert refused.line >= 1
            raise
        for record in found:
            assert 1 <= record.prompt_tokens <= MAX_TOKENS and 1 <= record.output_tokens <= MAX_TOKENS
            assert record.arrival is None or 0 <= record.arrival <= 2**63 - 1


@pytest.mark.parametrize("form", FORMATS)
@rounds(25)
@given(data=st.data())
def test_spliced_bytes(form: TraceFormat, data: st.DataObject) -> None:
    assert_parses_or_refuses(form, data.draw(spliced(TEXTS[form].encode())))


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in TABLES])
@rounds(25)
@given(data=st.data())
def test_any_value_in_a_record(form: TraceFormat, data: st.DataObject) -> None:
    sound = (
        json.loads(TEXTS[form])
        if form == "sharegpt"
        else list(map(json.loads, TEXTS[form].split("\n\n")[0].splitlines()))
    )
    found: Any = data.draw(mutated(sound))
    assert_parses_or_refuses(form, as_json(found).encode())
    if isinstance(found, list):
        assert_parses_or_refuses(form, "\n".join(map(as_json, found)).encode())


@pytest.mark.parametrize("form", TABLES)
@rounds(25)
@given(data=st.data())
def test_any_cell_in_a_table(form: TraceFormat, data: st.DataObject) -> None:
    header, *rows = TEXTS[form].splitlines()
    cells = [row.split(",") for row in rows]
    row = data.draw(st.sampled_from(cells))
    row[data.draw(st.integers(0, len(row) - 1))] = data.draw(CELLS)
    assert_parses_or_refuses(
        form, "\n".join([header, *map(",".join, cells)]).encode("utf-8", "surrogatepass")
    )


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"x" * 10**6, mtime=0),
        DEEP,
        b'{"a":' * 100_000,
        b"[{" + b'"a":[' * 100_000,
        b'[{"conversations": ' + DEEP,
        b"9" * 10**6,
        b'[{"conversations": "' + b"x" * 2**25,
        b" " * (2**24 + 1),
        b"\n" * 10**5,
        b'"' * 10**6,
        b"\x00" * 2**20,
        TEXTS["azure"].encode("utf-16"),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_oversized_or_truncated_files(content: bytes) -> None:
    for form in FORMATS:
        assert_parses_or_refuses(form, content)


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/urandom", "loop", "folder", "a" * 5000, "\0", ""])
def test_paths_other_than_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    for form in FORMATS:
        with pytest.raises(TraceError), refuses_cleanly():
            read(Path(name), form)
