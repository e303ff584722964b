"""The timeline of a run on disk, beside its result, from which ``trace`` draws. Windows are written as they arrive.

A gzipped file of JSON lines: a head, one line per window with its records as arrays, and a foot with the names behind
their small numbers. The file of a long run ends early and records that.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, Self, cast

from pydantic import TypeAdapter, ValidationError

from ...sched.observe import Clock, Observer
from .files import packed_whole
from .provenance import ResultModel
from .result import ResultError
from .timeline import Names, Site, Window

FILE: Final = "timeline.jsonl.gz"
RESULT: Final = "result.json"  # in the same folder
_NAMED: Final = re.compile(r"timeline(\.\d+)?\.jsonl\.gz$")
MAX_RECORDS: Final = 2_000_000  # records, which take about a hundred megabytes when drawn
MAX_LINE_LENGTH: Final = 2**28
MAX_RANKS: Final = 256

_WINDOW: Final = TypeAdapter(Window)


class _Head(ResultModel):
    schema_version: Literal["1.0"] = "1.0"
    timeline: Literal["schedbench"] = "schedbench"


class _Foot(ResultModel):
    sites: tuple[Site, ...]
    streams: dict[int, str]
    left_out: int
    kv: tuple[tuple[int, int], ...] = ()  # ns, and tokens in use from then on


class KvLog(Observer):
    """Keeps each change of the KV in use in ``kept``, with its instant."""

    def __init__(self, clock: Clock, kept: list[tuple[int, int]]) -> None:
        self._clock, self._kept = clock, kept

    def kv_usage(self, used_tokens: int) -> None:
        if not self._kept or self._kept[-1][1] != used_tokens:
            self._kept.append((self._clock.now(), used_tokens))


class TimelineRecording:
    """An instrument. The file appears as a whole when the run is over; of several passes it holds the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pass = ExitStack()
        self._file: BinaryIO | None = None
        self._count = self._left_out = 0
        self._kv: list[tuple[int, int]] = []

    def observer(self, clock: Clock) -> Observer:
        """Of the pass that has begun: sees what no window holds."""
        return KvLog(clock, self._kv)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._drop()

    def begin(self) -> None:
        self._drop()
        self._file = self._pass.enter_context(packed_whole(self._path, level=1))
        self._count = self._left_out = 0
        self._kv = []
        self._write(_Head().model_dump_json().encode())

    def feed(self, window: Window) -> None:
        size = len(window.ranges) + len(window.ops) + len(window.calls) + len(window.waits)
        if self._left_out or self._count + size > MAX_RECORDS:
            self._left_out += size
        else:
            self._count += size
            ranges, ops, calls = [*window.ranges], [*window.ops], [*window.calls]
            self._write(_WINDOW.dump_json(replace(window, ranges=ranges, ops=ops, calls=calls)))

    def finish(self, names: Names) -> None:
        foot = _Foot(
            sites=tuple(names.sites), streams=dict(names.streams), left_out=self._left_out, kv=tuple(self._kv)
        )
        self._write(foot.model_dump_json().encode())
        self._file = None
        self._pass.close()

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        self._file.write(line + b"\n")

    def _drop(self) -> None:
        """Remove what was written of an unfinished pass."""
        if self._file is not None:
            self._file = None
            with suppress(_DroppedError):
                self._pass.__exit__(_DroppedError, _DroppedError(), None)


class _DroppedError(Exception):
    """The pass was dropped."""


@dataclass(frozen=True, slots=True)
class RecordedTimeline:
    """``left_out`` records at the end were not kept. Also resolves the names of its records."""

    windows: Sequence[Window]
    sites: Sequence[Site]
    streams: dict[int, str]
    left_out: int = 0
    kv: Sequence[tuple[int, int]] = ()


def timeline_file(rank: int) -> str:
    """The name of the file of a rank. A single rank has number 0."""
    return f"timeline.{rank}.jsonl.gz" if rank else FILE


def is_recording(name: str) -> bool:
    """Whether a file of this name is the recording of a rank."""
    return _NAMED.search(name) is not None


def read_ranks(folder: Path) -> dict[int, RecordedTimeline]:
    """Every rank's timeline in a folder, by rank. Raises as ``read_recording``."""
    return {
        rank: read_recording(folder / timeline_file(rank))
        for rank in range(MAX_RANKS)
        if (folder / timeline_file(rank)).is_file()
    }


def read_recording(path: Path) -> RecordedTimeline:
    """Raises ResultError for a file that is no recording, and OSError."""
    windows: list[Window] = []
    foot: _Foot | None = None
    try:
        with gzip.open(path) as file, TextIOWrapper(cast(Any, file), encoding="utf-8") as text:
            lines = iter(lambda: text.readline(MAX_LINE_LENGTH), "")
            _Head.model_validate_json(next(lines, ""))
            for line in lines:
                if line.startswith('{"start"'):
                    windows.append(_WINDOW.validate_json(line))
                else:
                    foot = _Foot.model_validate_json(line)
    except (ValidationError, ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        why: object = error
        if isinstance(error, ValidationError):
            why = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise ResultError(f"{path}: no timeline of a run: {why}") from None
    if foot is None:
        raise ResultError(f"{path}: no timeline of a run: it ends early")
    return RecordedTimeline(windows, foot.sites, foot.streams, foot.left_out, foot.kv)
