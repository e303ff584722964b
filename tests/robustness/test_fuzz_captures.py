"""Captures and maps: any bytes are refused with a message, or become a document that can be written and read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedbench.profiles.captures import capture, maps
from schedbench.profiles.captures.capture import CaptureFileError
from schedbench.profiles.captures.files import Reader
from schedbench.profiles.captures.maps import MapError
from schedbench.profiles.captures.nsys.activity import MAGIC
from schedbench.profiles.captures.nsys.reader import scrub
from schedbench.profiles.picture.trace import content, events
from schedbench.profiles.record.recording import read_recording
from schedbench.profiles.record.result import Result, ResultError
from tests.profiles.captures.exports import Export, own_loop, sglang_loop
from tests.profiles.cuda.conftest import Trace
from tests.robustness.hostile import (
    FUZZED,
    NUMBERS,
    WORDS,
    as_json,
    mutated,
    refuses_cleanly,
    rounds,
    spliced,
)

pytestmark = [pytest.mark.wide, *FUZZED]

SHIPPED = (Path(maps.__file__).parent / "sglang.yaml").read_bytes()
CELLS = st.sampled_from(
    (None, *(n for n in NUMBERS if abs(n) < 2**63), *WORDS[:8], b"\xff\x00")
) | st.integers(-(2**63), 2**63 - 1)


def drawn(kind: str) -> Any:
    drawer = Trace() if kind == "trace" else Export()
    sglang_loop(drawer, model=True)
    return drawer


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return Path(drawn("export").write(tmp_path_factory.mktemp("sound") / "x.sqlite")).read_bytes()


def assert_reads_or_refuses(path: Path) -> None:
    with refuses_cleanly(CaptureFileError, ResultError):
        found = Reader().read(path)
        assert Result.from_json(found.to_json()) == found
        if path.read_bytes().startswith(MAGIC):
            scrub(path, path.with_name("scrubbed.sqlite"))


@rounds(60)
@given(data=st.data())
def test_spliced_bytes_in_an_export(tmp_path: Path, sound: bytes, data: st.DataObject) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(data.draw(spliced(sound)))
    assert_reads_or_refuses(path)


@rounds(60)
@given(data=st.data())
def test_any_cell_in_an_export(tmp_path: Path, data: st.DataObject) -> None:
    export = drawn("export")
    own_loop(export)
    for _ in range(data.draw(st.integers(1, 4))):
        rows = export.rows[data.draw(st.sampled_from(sorted(export.rows)))]
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        row[data.draw(st.sampled_from(sorted(row)))] = data.draw(CELLS)
    tables = sorted(export.rows)
    gone = data.draw(st.lists(st.sampled_from((*tables, "StringIds")), max_size=2))
    assert_reads_or_refuses(export.write(tmp_path / "x.sqlite", without=tuple(gone)))


@rounds(60)
@given(document=mutated(drawn("trace").document()))
@example(document=[])
@example(document={"traceEvents": [], "deviceProperties": [{"name": 5}], "baseTimeNanoseconds": 10**400})
def test_any_value_in_a_trace(tmp_path: Path, document: Any) -> None:
    path = tmp_path / "x.json"
    path.write_text(as_json(document))
    assert_reads_or_refuses(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"SQLite format 3\x00",
        b"SQLite format 3\x00" + b"\xff" * 5000,
        b"[" * 10**6,
        b'{"traceEvents": [' + b"[" * 10**5,
        gzip.compress(b"x" * 10**6, mtime=0),
        gzip.compress(json.dumps({"traceEvents": []}).encode(), mtime=0)[:-9],
        b"\x1f\x8b",
        "{}".encode("utf-16"),
        b'{"traceEvents": 1' + b"0" * 10**5 + b"}",
    ],
    ids=lambda content: repr(content[:20]),
)
@pytest.mark.parametrize("name", ["x.sqlite", "x.json", "x.json.gz"])
def test_oversized_or_truncated_files(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert_reads_or_refuses(tmp_path / name)


def test_a_file_over_the_limit_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MAX_BYTES", 2**20)
    with (tmp_path / "x.json").open("wb") as file:
        file.write(b'{"traceEvents": []')
        file.truncate(2**40)  # without content on the disk; more than any memory
    with pytest.raises(ResultError, match=r"^\S+x\.json: more than 1048576 bytes of JSON"):
        Reader().read(tmp_path / "x.json")


@pytest.mark.parametrize(
    "name", ["/dev/zero", "loop.sqlite", "folder", "a" * 5000, "\0.sqlite", "nowhere.nsys-rep"]
)
def test_paths_other_than_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.sqlite").symlink_to("loop.sqlite")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ResultError), refuses_cleanly(longest=10_000):
        Reader().read(Path(name))


@rounds(60)
@given(content=spliced(SHIPPED))
@example(content=b"[" * 10**5)
@example(content=b"ranges: &a [*a]")
def test_maps(content: bytes) -> None:
    with refuses_cleanly(MapError):
        maps.FILES.parse(content, "map")


@rounds(60)
@given(data=st.data())
def test_recordings(tmp_path: Path, data: st.DataObject) -> None:
    """A recording that is read can be drawn."""
    head = {"schema_version": "1.0"}
    foot = {"sites": [["a.py", "f", 1, "x"]], "streams": {"0": "s"}, "left_out": 0}
    empty = {"start": 0, "end": 9, "ops": [], "calls": []}
    window = empty | {"ranges": [["a", 0, 1, 0, 5]], "waits": [[0, 1, 2, 0]]}
    found = data.draw(mutated([head, window, foot]))
    lines = "\n".join(map(as_json, found)).encode("utf-8", "surrogatepass")
    path = tmp_path / "timeline.jsonl.gz"
    path.write_bytes(gzip.compress(data.draw(st.just(lines) | spliced(lines)), mtime=0))
    with refuses_cleanly(ResultError):
        recorded = read_recording(path)
        list(events(content(recorded)))
