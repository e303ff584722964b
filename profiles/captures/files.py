"""Reads a file by its content: a result, a capture of Nsight Systems, or a trace of torch.profiler."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..record.files import ENDING
from ..record.recording import RecordedTimeline
from ..record.result import Result, ResultError
from . import maps
from .capture import TRACE, CaptureFileError, ProfilerCapture, parse_trace, read_json
from .maps import RangeMap
from .measure import reading, result
from .nsys.activity import MAGIC
from .nsys.reader import open_export, scrub
from .steps import launches

_REPORTS: Final = (".nsys-rep", ".qdrep")  # of current and of old versions
SUFFIXES: Final = (".sqlite", *_REPORTS, ".json.gz")


@dataclass(frozen=True, slots=True)
class Reader:
    """``map`` is the name or the file of a map; for None, the shipped map whose ranges the capture has is used.
    ``nsys`` is the tool that exports reports; for None it is searched for. ``command`` goes into the documents of
    captures."""

    map: str | None = None
    nsys: str | None = None
    command: str = ""

    def read(self, path: Path) -> Result:
        """The document of a file. Raises ResultError, CaptureFileError, MapError, OSError, and MachineError if nsys is
        needed and not found."""
        meaning = self._map()
        with self.opened(path) as found:
            if isinstance(found, Result):
                return found
            return result(found, meaning or chosen(found), name=stem(path), command=self.command)

    def timeline(self, path: Path) -> RecordedTimeline:
        """The records of a capture. Raises as ``read`` does, and ResultError for a result, which has none."""
        meaning = self._map()
        with self.opened(path) as found:
            if isinstance(found, Result):
                raise ResultError(
                    f"{path}: a result has no timeline in it; `run --output-dir` keeps one beside it"
                )
            read = reading(found, meaning or chosen(found))
            return RecordedTimeline([read.window], read.sites, read.streams)

    def scrubbed(self, path: Path, output: Path) -> None:
        """Write a copy of a capture of Nsight Systems with only what is read of it. Raises as ``read`` does."""
        with self._export(path) as export:
            if export is None:
                raise CaptureFileError(f"{path}: only captures of Nsight Systems are scrubbed")
            scrub(export, output)

    def _map(self) -> RangeMap | None:
        return None if self.map is None else maps.load(self.map)

    @contextmanager
    def _export(self, path: Path) -> Iterator[Path | None]:
        """The sqlite file of a capture of Nsight Systems; None for another file."""
        if _beginning(path).startswith(MAGIC):
            yield path
        elif path.suffix in _REPORTS:
            from .nsys.record import exported, find  # which imports NVTX, and NumPy with it

            with exported(find(self.nsys, os.environ), path) as export:
                yield export
        else:
            yield None

    @contextmanager
    def opened(self, path: Path) -> Iterator[ProfilerCapture | Result]:
        """Raises as ``read`` does."""
        with self._export(path) as export:
            if export is None:
                yield _from_json(path)
            else:
                with open_export(export) as found:
                    yield found


def _from_json(path: Path) -> ProfilerCapture | Result:
    try:
        document = read_json(path)
    except CaptureFileError as error:
        raise ResultError(
            f"{error}; expected a result.json, an .nsys-rep, its .sqlite, or a trace of torch's profiler"
        ) from None
    events = isinstance(document, list) and any(isinstance(one, dict) and "ph" in one for one in document)
    if events or (isinstance(document, dict) and TRACE in document):
        return parse_trace(document, path)
    return Result.from_document(document, name=str(path))


def chosen(capture: ProfilerCapture) -> RangeMap:
    """The shipped map that finds the most steps in the capture; of equal ones the first."""
    known = [maps.load(name) for name in maps.names()]
    return max(known, key=lambda meaning: launches(capture.spans, meaning).total())


def captures_in(folder: Path) -> Sequence[Path]:
    """The captures in a folder, without Perfetto files of the tool. Of a report with its export beside it, the
    export."""
    names = (path.name for path in folder.iterdir())
    found = [folder / name for name in sorted(names) if name.endswith(SUFFIXES) and not name.endswith(ENDING)]
    done = {path.stem for path in found if path.suffix == ".sqlite"}
    return [path for path in found if path.suffix not in _REPORTS or path.stem not in done]


def _beginning(path: Path) -> bytes:
    try:
        if stat.S_ISREG(path.stat().st_mode):
            with path.open("rb") as file:
                return file.read(len(MAGIC))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    what = "a folder without a result.json" if path.is_dir() else "not a regular file"
    raise ResultError(f"{path}: {what}")


def stem(path: Path) -> str:
    name = path.name
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), path.stem)
