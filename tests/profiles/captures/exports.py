"""Synthetic exports of Nsight Systems: the tables of three kinds of version, with two loops drawn into them. Names of
tables and columns, and the meaning of their numbers, are the tool's; all other content is invented."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tests.profiles.cuda.conftest import Trace

Version = Literal["old", "middle", "new"]
VERSIONS: tuple[Version, ...] = ("old", "middle", "new")

_PROCESS = 77 << 24
_PLACE = ("start", "end", "deviceId", "contextId", "streamId", "correlationId")
_COPY = ("bytes", "copyKind", "srcKind", "dstKind")
_NVTX = ("start", "end", "eventType", "text", "globalTid", "int64Value")
_COLUMNS: dict[str, tuple[str, ...]] = {
    "StringIds": ("id", "value"),
    "NVTX_EVENTS": _NVTX,
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "end", "eventClass", "globalTid", "correlationId", "nameId"),
    "CUPTI_ACTIVITY_KIND_KERNEL": (*_PLACE, "shortName", "demangledName", "gridX"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (*_PLACE, *_COPY),
    "CUPTI_ACTIVITY_KIND_MEMSET": (*_PLACE, "bytes", "value"),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (*_PLACE, "graphId", "graphExecId"),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (*_PLACE, "syncType", "eventId"),
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": ("deviceId", "contextId", "streamId", "correlationId", "eventId"),
    "META_DATA_CAPTURE": ("name", "value"),
    "META_DATA_EXPORT": ("name", "value"),
    "TARGET_INFO_GPU": ("id", "name"),
    "TARGET_INFO_NVTX_CUDA_STREAM": ("streamId", "processId", "contextId", "name"),
    "PROFILER_OVERHEAD": ("start", "end", "globalTid", "nameId"),
    "DIAGNOSTIC_EVENT": ("timestamp", "severity", "text", "globalPid"),
    "ENUM_CUDA_MEM_KIND": ("id", "name", "label"),
    "ENUM_CUDA_MEMCPY_OPER": ("id", "name", "label"),
}  # fmt: skip
_LATER: dict[str, tuple[str, ...]] = {
    "NVTX_EVENTS": (
        "rangeId",
        "category",
        "color",
        "textId",
        "endGlobalTid",
        "domainId",
        "uint64Value",
        "doubleValue",
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": ("globalPid", "graphNodeId"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("globalPid", "graphNodeId"),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("globalPid", "graphNodeId"),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("globalPid",),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": ("globalPid",),
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": ("globalPid",),
}
_KINDS = {"Pageable": 0, "Pinned": 1, "Device": 2}
_WAYS = {"HtoD": 1, "DtoH": 2, "DtoD": 8}


class Export:
    """``old`` has no enumerations, CUPTI's numbers, no process column in operations, and plain texts. ``middle`` has
    nsys's numbers and explains them. ``new`` explains its own numbers, registers every text, and keeps no order."""

    MAIN = _PROCESS | 4242

    def __init__(self, version: Version = "middle") -> None:
        self.version: Version = version
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}
        self._correlation = 100
        self.put("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value="API_KEY=hunter2")
        self.put("META_DATA_CAPTURE", name="COLLECTION_HOST_NAME", value="hostname-of-a-user")
        self.put("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.7.2")
        self.put("TARGET_INFO_GPU", id=0, name="Made-up GPU")
        if version != "old":
            self._explain()

    def put(self, table: str, **cells: Any) -> None:
        self.rows.setdefault(table, []).append(cells)

    def string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings) + 1)

    def named(
        self,
        name: str,
        start: float,
        end: float,
        *,
        payload: int | None = None,
        domain: int = 0,
        thread: int = MAIN,
        kind: int = 59,
    ) -> None:
        text = {"textId": self.string(name)} if self.version == "new" else {"text": name}
        times = {"start": _ns(start), "end": None if kind == 34 else _ns(end)}
        more = {} if payload is None else {"int64Value": payload}
        self.put("NVTX_EVENTS", eventType=kind, globalTid=thread, domainId=domain, **times, **text, **more)

    def mark(self, name: str, at: float, *, payload: int, domain: int = 0) -> None:
        self.named(name, at, at, payload=payload, domain=domain, kind=34)

    def domain(self, number: int, name: str) -> None:
        self.put("NVTX_EVENTS", eventType=75, start=0, globalTid=self.MAIN, domainId=number, text=name)

    def call(self, name: str, start: float, end: float, *, thread: int = MAIN, driver: bool = False) -> int:
        self._correlation += 1
        name_id = self.string(f"{name}_v3020")
        self.put(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=_ns(start), end=_ns(end), eventClass=int(driver), globalTid=thread,
            correlationId=self._correlation, nameId=name_id,
        )  # fmt: skip
        return self._correlation

    def kernel(
        self, correlation: int, start: float, end: float, *, stream: int = 7, name: str = "k", **more: Any
    ) -> None:
        """``more`` holds the ``graphNodeId`` of a graph's kernel."""
        self._operation("KERNEL", correlation, start, end, stream, shortName=self.string(name), **more)

    def replayed(self, correlation: int, start: float, end: float, *, stream: int, node: int) -> None:
        self.kernel(correlation, start, end, stream=stream, name="gemm", graphNodeId=node + 1)

    def memcpy(
        self, correlation: int, what: str, start: float, end: float, *, size: int, stream: int = 7
    ) -> None:
        way, _, kinds = what.partition(" ")
        source, target = kinds.strip("()").split(" -> ")
        numbers = {"copyKind": _WAYS[way], "srcKind": self._kind(source), "dstKind": self._kind(target)}
        self._operation("MEMCPY", correlation, start, end, stream, bytes=size, **numbers)

    def copy(self, what: str, at: float, *, size: int, stream: int = 7, blocking: bool = False) -> None:
        correlation = self.call("cudaMemcpyAsync", at, at + 1)
        self.memcpy(correlation, what, at + 1.5, at + 2.5, size=size, stream=stream)
        if blocking:
            self.synchronize(at + 1.1, at + 12, stream=stream)

    def synchronize(self, start: float, end: float, *, stream: int) -> None:
        correlation = self.call("cudaStreamSynchronize", start, end)
        self._operation("SYNCHRONIZATION", correlation, start, end, stream, syncType=3, eventId=0)

    def record(self, at: float, *, stream: int, event: int) -> int:
        correlation = self.call("cudaEventRecord", at, at + 0.5)
        self.put(
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT", streamId=stream, correlationId=correlation, eventId=event,
            deviceId=0, contextId=1, globalPid=_PROCESS,
        )  # fmt: skip
        return correlation

    def wait_event(self, at: float, *, stream: int, event: int) -> None:
        correlation = self.call("cudaStreamWaitEvent", at, at + 0.5)
        self._operation("SYNCHRONIZATION", correlation, at, at + 0.5, stream, syncType=2, eventId=event)

    def write(self, path: Path, *, without: tuple[str, ...] = ()) -> Path:
        """``without`` leaves out tables."""
        tables = {**self.rows, "StringIds": [{"id": i, "value": text} for text, i in self._strings.items()]}
        path.unlink(missing_ok=True)
        connection = sqlite3.connect(path)
        for table, rows in tables.items():
            if table not in without:
                self._write(connection, table, rows)
        connection.commit()
        connection.close()
        return path

    def _write(self, connection: sqlite3.Connection, table: str, rows: list[dict[str, Any]]) -> None:
        columns = _COLUMNS[table] + (() if self.version == "old" else _LATER.get(table, ()))
        extra = ("greenContextId",) if self.version == "new" and table.startswith("CUPTI") else ()
        names = [f'"{column}"' for column in (*columns, *extra)]
        connection.execute(f'CREATE TABLE "{table}" ({", ".join(names)})')
        places = ", ".join("?" * len(columns))
        ordered = reversed(rows) if self.version == "new" else rows
        cells = [tuple(row.get(column) for column in columns) for row in ordered]
        inserted = ", ".join(names[: len(columns)])
        connection.executemany(f'INSERT INTO "{table}" ({inserted}) VALUES ({places})', cells)

    def _operation(
        self, kind: str, correlation: int, start: float, end: float, stream: int, **more: Any
    ) -> None:
        self.put(
            f"CUPTI_ACTIVITY_KIND_{kind}", start=_ns(start), end=_ns(end), deviceId=0, contextId=1, streamId=stream,
            correlationId=correlation, globalPid=_PROCESS, **more,
        )  # fmt: skip

    def _kind(self, name: str) -> int:
        """``old`` uses CUPTI's numbers; ``new`` uses invented ones."""
        return _KINDS[name] + {"old": 1, "middle": 0, "new": 40}[self.version]

    def _explain(self) -> None:
        for name in _KINDS:
            self.put("ENUM_CUDA_MEM_KIND", id=self._kind(name), name=f"MEMKIND_{name.upper()}", label=name)
        words: Mapping[str, str] = {
            "HtoD": "Host-to-Device",
            "DtoH": "Device-to-Host",
            "DtoD": "Device-to-Device",
        }
        for name, number in _WAYS.items():
            label = words[name] if self.version == "new" else name
            self.put("ENUM_CUDA_MEMCPY_OPER", id=number, name=f"MEMCPY_{name}", label=label)


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def sglang_loop(
    drawer: Export | Trace, *, steps: int = 4, slow: float = 0.0, blocking: bool = True, model: bool = False
) -> None:
    """An overlapped loop under SGLang's names: a step's result is processed after the next one's launch, and 200 us
    lie between launches, ``slow`` more with every one. The first step is a prefill. Schedule is stream 7, forward 13.
    ``blocking``: each step uploads with a blocking copy. ``model``: with the model runner's ranges.
    """
    for step in range(steps + 1):
        at = step * (200 + slow)
        drawer.named("scheduler.recv_requests", at, at + 5)
        drawer.named("scheduler.get_next_batch_to_run", at + 6, at + 40)
        if step < steps:
            drawer.copy("HtoD (Pageable -> Device)", at + 10, size=64, stream=7, blocking=blocking)
            drawer.named("scheduler.run_batch", at + 41, at + 80)
            if model:
                name = "step[prefill bs=2 toks=40]" if step == 0 else "step[decode bs=2]"
                drawer.named(name, at + 45, at + 70)
            correlation = drawer.call("cudaGraphLaunch", at + 50, at + 55)
            for node in range(3):
                drawer.replayed(correlation, at + 60 + 40 * node, at + 95 + 40 * node, stream=13, node=node)
            drawer.copy("DtoH (Device -> Pinned)", at + 72, size=16, stream=13)
        if step:
            drawer.named("scheduler.process_batch_result", at + 85, at + 150)
            drawer.synchronize(at + 90, at + 100, stream=13)


def looped(version: Version = "middle", **more: Any) -> Export:
    """An export with ``sglang_loop``."""
    export = Export(version)
    sglang_loop(export, **more)
    return export


def own_loop(export: Export, *, steps: int = 6) -> None:
    """A serial loop of ours, as our ranges and marks describe it. The first step is a prefill, all others decode,
    steady from the third on."""
    export.domain(5, "schedbench")
    for step in range(steps):
        at = step * 100.0
        kind = "prefill" if step == 0 else "decode"
        export.named("prepare", at, at + 20, payload=step, domain=5)
        export.named("model", at + 21, at + 40, payload=step, domain=5)
        correlation = export.call("cudaLaunchKernel", at + 25, at + 27)
        export.kernel(correlation, at + 30, at + 60, stream=13)
        export.mark(f"{kind} bs=4", at + 41, payload=step, domain=5)
        export.named("settle", at + 45, at + 70, payload=step, domain=5)
        export.synchronize(at + 46, at + 62, stream=13)
        export.mark(f"settled {kind}{' steady' if step > 2 else ''}", at + 71, payload=step, domain=5)
        export.named("not ours", at + 1, at + 2, domain=6)
