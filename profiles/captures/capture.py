"""The content of a capture of any tool: named ranges of the host's threads, and rows of calls and operations.

A Chrome trace of torch.profiler, plain or gzipped, is read here, an export of Nsight Systems in ``nsys``. Which ranges
make a step is defined by a map (``captures.maps``).
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, cast

from pydantic_core import from_json

from ...scenarios.problems import show
from ..cuda.kineto import API, GPU, SYNC, KinetoRow, rows

Tool = Literal["nsys", "torch", "vgpu"]


class CaptureFileError(ValueError):
    """A file that is not a capture, or that cannot be read."""


class CapturedRange(NamedTuple):
    """A named range of the program. Instants are in ns on the rows' clock; a mark has equal ones."""

    name: str
    start: int
    end: int
    thread: int
    domain: str = ""
    payload: int | None = None


@dataclass(frozen=True, slots=True)
class ProfilerCapture:
    """``rows`` returns, in order of time, the rows of the process of a thread, or of the busiest process for None, and
    ``streams`` that process's names by the rows' numbers of streams. ``facts`` describe the machine and the tool,
    without any user, host, folder or environment variable. ``missing`` says what the capture lacks, and what follows
    from that."""

    tool: Tool
    spans: Sequence[CapturedRange]
    rows: Callable[[int | None], list[KinetoRow]]
    streams: Callable[[int | None], Mapping[int, str]] = lambda _: {}
    facts: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


TRACE: Final = "traceEvents"
GZIP: Final = b"\x1f\x8b"
MAX_BYTES: Final = 2**32  # of JSON
_PIECE: Final = 2**24
_ANNOTATION: Final = "user_annotation"
# The keys of versions that torch writes.
_VERSIONS: Final = ("schemaVersion", "cupti_version", "cuda_runtime_version", "cuda_driver_version")


def read_json(path: Path) -> Any:
    """The content of a regular file, plain or gzipped. Raises CaptureFileError, OSError."""
    with path.open("rb") as file:
        opened = gzip.open if file.read(len(GZIP)) == GZIP else open
    try:
        with opened(path, "rb") as unpacked:
            content = b"".join(_pieces(cast(BinaryIO, unpacked)))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CaptureFileError(f"{path}: not gzip: {error}") from None
    if len(content) > MAX_BYTES:
        raise CaptureFileError(f"{path}: more than {MAX_BYTES} bytes of JSON")
    try:
        return from_json(content)
    except ValueError as error:
        raise CaptureFileError(f"{path}: not JSON: {error}") from None


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Pieces of the unpacked file, up to one byte beyond the limit: a small archive may hold anything."""
    size = 0
    while piece := file.read(min(_PIECE, MAX_BYTES + 1 - size)):
        size += len(piece)
        yield piece


def parse_trace(trace: object, path: Path) -> ProfilerCapture:
    """The capture of a Chrome trace. Raises CaptureFileError."""
    document = {TRACE: trace} if isinstance(trace, list) else trace
    if not isinstance(document, dict):
        raise CaptureFileError(f"{path}: not a Chrome trace but {show(document)}")
    try:
        found = rows(document)
        spans = named_ranges(document)
    except ValueError as error:
        raise CaptureFileError(f"{path}: {error}") from None
    processes = {str(event.get("pid")) for event in document[TRACE] if event.get("cat") in API}
    if len(processes) > 1:
        raise CaptureFileError(f"{path}: calls of {len(processes)} processes: give the trace of one")
    graphs = any(row.name.startswith("cudaGraphLaunch") for row in found)
    versions = {key: str(document[key]) for key in _VERSIONS if isinstance(document.get(key), int)}
    return ProfilerCapture(
        tool="torch",
        spans=spans,
        rows=lambda thread: found,  # noqa: ARG005 - a trace has one process
        # Kineto records the kernels of a graph one by one.
        facts={"versions": versions, "gpu": _gpu(document), "cuda_graph_trace": "node" if graphs else "none"},
        missing=tuple(_missing(found)),
    )


def named_ranges(trace: Mapping[str, Any]) -> list[CapturedRange]:
    """Ranges of record_function, in order of time. Raises ValueError if ``trace`` is not a trace."""
    found = rows(trace, {_ANNOTATION})
    spans = [CapturedRange(row.name, row.start, row.end, row.thread) for row in found]
    return sorted(spans, key=lambda span: (span.start, -span.end))


def _gpu(trace: Mapping[str, Any]) -> str | None:
    devices = trace.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None


def _missing(found: list[KinetoRow]) -> Iterator[str]:
    categories = {row.category for row in found}
    if not categories & {*GPU}:
        yield "no GPU activity: there are no counts of the device (ProfilerActivity.CUDA was off, or there was no GPU)"
        return
    if not categories & {*API}:
        yield "no calls of CUDA's API: operations belong to no range, and syncs are not counted"
    if SYNC not in categories:
        yield "no sync events: syncs may have no stream, and waits of one stream for another are not seen"
