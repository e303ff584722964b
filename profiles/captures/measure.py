"""Reads a capture by a map into one window of the timeline, and makes a result document of it.

Forward and schedule streams are found by name, by number, or by the operations on them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from pydantic import ValidationError

from ...sched.observe import SLEEP, Category
from ..cuda.join import NOWHERE, OF_HOST, Joined
from ..cuda.kineto import API, GPU, KinetoRow, op_kind
from ..cuda.log import StreamTable
from ..measure.counts import CountsSink, line_rows
from ..measure.distribution import Distribution
from ..measure.metrics import (
    NO_FORWARD,
    Metrics,
    exact,
    forward_metrics,
    idle_part,
    time_metric,
    waiting_metrics,
)
from ..measure.steps import WITHOUT_LAUNCH
from ..measure.waiting import WaitingSink
from ..record.conclusion import number_of
from ..record.environment import tool
from ..record.provenance import HardwarePart, Labels, RelayPart, RunPart, ScenarioPart
from ..record.result import Abstained, CopyRow, Hazards, KindCounts, Result, SyncRow, canonical
from ..record.timeline import Site, Window
from .capture import CaptureFileError, ProfilerCapture, Tool
from .maps import RangeMap
from .steps import CapturedSteps, launches

# bytes; a pageable source up to this size is taken inside the call, as NVIDIA documents
INLINE: Final = 64 * 1024
TOOLS: Final = {"nsys": "Nsight Systems", "torch": "torch.profiler", "vgpu": "virtual GPU"}
_UNWATCHED: Final = Abstained(abstained="captures are not watched for hazards")
_NO_REQUESTS: Final = "a capture has no requests"


@dataclass(frozen=True, slots=True)
class CaptureReading:
    """``notes`` say what the capture lacks, and what was assumed."""

    window: Window
    sites: Sequence[Site]
    streams: dict[int, str]
    steps: CapturedSteps
    notes: tuple[str, ...]
    unfit: str | None  # why the device's part cannot be counted


def reading(capture: ProfilerCapture, meaning: RangeMap) -> CaptureReading:
    """Raises CaptureFileError."""
    thread, others = _thread(capture, meaning)
    rows = capture.rows(thread)
    spans = [span for span in capture.spans if span.thread == thread]
    epoch = min([*(row.start for row in rows), *(span.start for span in spans)], default=0)
    steps = CapturedSteps(spans, meaning, epoch=epoch)
    callers, elsewhere = _callers(rows, thread, steps, capture.tool)
    rows, left_out = _of_own_devices(rows, callers)
    table, names = StreamTable(), capture.streams(thread)
    for number, name in names.items():
        table.names[table.by_cupti(number)] = name
    end = max([*(row.end for row in rows), *(span.end for span in spans)], default=epoch)
    joined = Joined(rows, steps.log, table, callers, epoch, INLINE, start=0, end=end - epoch + 1)
    given = {table.by_cupti(number) for number in names}
    window = joined.window
    roles, forward = stream_roles(window, table, meaning, given)
    if forward is not None:
        window.ops = [
            op if op.stream == forward or not op.forward else op._replace(forward=False) for op in window.ops
        ]
    notes = [*capture.missing, *_remarks(steps, joined, meaning, others=others, elsewhere=elsewhere)]
    if left_out:
        notes.append(f"left out: {number_of(left_out, 'operation')} of GPUs that only other threads use")
    unfit = None if window.ops else "no GPU activity in the capture"
    return CaptureReading(window, (), roles, steps, tuple(notes), unfit)


def result(capture: ProfilerCapture, meaning: RangeMap, *, name: str, command: str = "") -> Result:
    """The document of a capture. Raises CaptureFileError."""
    return document(capture, meaning, reading(capture, meaning), name=name, command=command)


def document(
    capture: ProfilerCapture,
    meaning: RangeMap,
    found: CaptureReading,
    *,
    name: str,
    command: str = "",
    hazards: Hazards | Abstained = _UNWATCHED,
    failure: str | None = None,
    cancelled: bool = False,
) -> Result:
    """The document of what was read of a capture. ``failure`` says how the program failed; ``cancelled``: it was
    interrupted. Raises CaptureFileError."""
    device, emulated = _device(found), capture.tool == "vgpu"
    metrics = {**_host_metrics(found), **device.pop("metrics")}
    wall_s = (found.window.end - found.window.start) / 1e9
    # In place of a scenario: what two captures must have in common to be compared.
    expanded: dict[str, Any] = {
        "name": name,
        "about": "watched on the virtual GPU" if emulated else f"capture of {TOOLS[capture.tool]}",
        "device": _recorded(capture, found),
        "measure": {"map": meaning.name, "map_sha256": meaning.sha256},
    }
    try:
        return Result(
            tool=tool(),
            run=RunPart(
                id="", command=command, started="", wall_s=wall_s, failure=failure, cancelled=cancelled
            ),
            environment=_environment(capture, meaning, found),
            labels=Labels(
                emulated=emulated,
                profiled=not emulated,
                host="modelled" if emulated else "measured",
                capture=capture.tool,
            ),
            scenario=ScenarioPart(
                expanded=expanded, sha256=hashlib.sha256(canonical(expanded).encode()).hexdigest()
            ),
            workload=Abstained(abstained=_NO_REQUESTS),
            relay=RelayPart(state="unknown"),
            hardware=HardwarePart(name=capture.facts.get("gpu") or "unknown GPU"),
            metrics=exact(metrics) if emulated else metrics,
            **device,
            requests=(),
            outputs=Abstained(abstained=_NO_REQUESTS),
            hazards=hazards,
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CaptureFileError(f"{name}: numbers that cannot be: {first['msg']}") from None


def _recorded(capture: ProfilerCapture, found: CaptureReading) -> dict[str, Any]:
    """Whether the device was recorded; whether the kinds of its copies' memory are known, where it has copies; and how
    its graphs were traced, where that is known."""
    memories = ["Unknown" not in op.name for op in found.window.ops if op.kind in OF_HOST]
    graphs = capture.facts.get("cuda_graph_trace")
    return {
        "recorded": found.unfit is None and bool(found.window.calls),
        **({"memory_kinds": any(memories)} if memories else {}),
        **({"cuda_graph_trace": graphs} if graphs in ("graph", "node") else {}),
    }


def _device(found: CaptureReading) -> dict[str, Any]:
    """The fields of ``Result`` that follow from the device's records."""
    waiting = WaitingSink()
    counts = CountsSink(waiting.take_exposed)
    waiting.feed(found.window)
    counts.feed(found.window)
    totals = waiting.finish()
    counts.finish()
    metrics = {**forward_metrics(waiting.forwards), **waiting_metrics(totals)}
    if found.unfit is not None:
        nothing = Abstained(abstained=found.unfit)
        steps = {kind: KindCounts(steps=count) for kind, count in sorted(counts.steps.items())}
        lines: dict[str, Any] = {"copies": (), "syncs": ()}
        return {"metrics": dict.fromkeys(metrics, nothing), "per_step": steps, "idle": nothing, **lines}
    return {
        "metrics": metrics,
        "per_step": counts.per_step(found),
        "copies": line_rows(CopyRow, counts.copies, found),
        "syncs": line_rows(SyncRow, counts.calls, found),
        "idle": idle_part(totals) if totals.window else Abstained(abstained=NO_FORWARD),
    }


def _thread(capture: ProfilerCapture, meaning: RangeMap) -> tuple[int | None, int]:
    """The thread that is read, None if there are no ranges, and the number of other threads that launch steps."""
    if found := launches(capture.spans, meaning):
        return min(found, key=lambda thread: (-found[thread], thread)), len(found) - 1
    busiest = Counter(span.thread for span in capture.spans).most_common(1)
    return (busiest[0][0] if busiest else None), 0


def _callers(
    rows: Sequence[KinetoRow], thread: int | None, steps: CapturedSteps, tool: Tool
) -> tuple[frozenset[int], bool]:
    """The thread's numbers among the calls, and whether they were guessed: a trace of torch may have other numbers for
    the threads of calls than for those of ranges."""
    calls = Counter(row.thread for row in rows if row.category in API)
    if thread is not None and (tool == "nsys" or not calls or thread in calls or not steps.launches):
        return frozenset({thread}), False
    return frozenset(caller for caller, _ in calls.most_common(1)), thread is not None


def _of_own_devices(rows: Sequence[KinetoRow], callers: Collection[int]) -> tuple[list[KinetoRow], int]:
    """The rows without those of GPUs that only other threads use, whose streams may have the same numbers; and the
    number of operations among these."""
    own = {row.correlation for row in rows if row.category in API and row.thread in callers}
    used = {row.device for row in rows if row.category in GPU and row.correlation in own}
    others = {row.device for row in rows} - {-1, *used} if used else set()
    left_out = sum(row.category in GPU and row.device in others for row in rows)
    return [row for row in rows if row.device not in others], left_out


def _remarks(
    steps: CapturedSteps, joined: Joined, meaning: RangeMap, *, others: int, elsewhere: bool
) -> Iterator[str]:
    if joined.abstained is not None and any(op.step >= 0 for op in joined.window.ops):
        yield joined.abstained
    if not steps.launches:
        yield "no range of the map launches a step: counts are of the whole capture"
    if steps.unknown_kinds:
        yield f"{number_of(steps.unknown_kinds, 'step has', 'steps have')} no range for their kind"
    if steps.unseen:
        yield f"{number_of(steps.unseen, 'result')} of steps that were launched before the capture began"
    if others:
        yield f"{number_of(others, 'more thread launches', 'more threads launch')} steps: only the busiest is counted"
    if elsewhere:
        yield "calls and ranges number their threads differently: the busiest thread's calls were taken"
    if joined.window.ops and not meaning.tells_idle:
        yield "the map has no ranges for time without work: such time counts as host late"
    if (lost := joined.notes["operations_without_call"]) and joined.notes["calls"]:
        yield f"{number_of(lost, 'operation has', 'operations have')} no call, hence no step"
    gpu = [row for row in joined.rows if row.category in GPU]
    if uncounted := sum(op_kind(row) is None for row in gpu):
        yield f"{number_of(uncounted, 'copy is', 'copies are')} not counted: neither h2d, d2h nor d2d, or not known"
    if (devices := len({row.device for row in gpu} - {-1})) > 1:
        yield f"operations of {devices} GPUs: their streams with one number count as one stream"
    others_calls = {
        row.correlation for row in joined.rows if row.category in API and row.thread not in joined.threads
    }
    if theirs := sum(row.correlation in others_calls for row in gpu):
        yield f"{number_of(theirs, 'operation was', 'operations were')} launched by other threads, in no step"


def _environment(capture: ProfilerCapture, meaning: RangeMap, found: CaptureReading) -> dict[str, Any]:
    """Facts that change times are at the top, where comparisons see them; the others are below ``capture``."""
    rest = dict(capture.facts)
    rest.pop("gpu", None)
    return {
        "source_of_counts": TOOLS[capture.tool],
        "cuda_graph_trace": rest.pop("cuda_graph_trace", "none"),
        "capture": {
            "versions": rest.pop("versions", {}),
            "map": meaning.name,
            "map_sha256": meaning.sha256,
            "steps": len(found.steps.launches),
            "notes": list(found.notes),
            **rest,
        },
    }


def _host_metrics(found: CaptureReading) -> Metrics:
    """The time from launch to launch, and the host's time by range."""
    parts = {info.step for info in found.window.launched if info.kind in WITHOUT_LAUNCH}
    starts = sorted(at for step, at in found.steps.launches.items() if step not in parts)
    asleep = sorted(span.start for span in found.window.ranges if span.name == SLEEP)
    periods = Distribution(
        b - a for a, b in pairwise(starts) if bisect_left(asleep, a) == bisect_left(asleep, b)
    )
    by_name: defaultdict[str, Distribution] = defaultdict(Distribution)
    for span in found.window.ranges:
        if span.name != SLEEP:
            by_name[span.name].add(span.end - span.start)
    why = "fewer than two launches without sleep between them"
    ranges = {f"range_ms.{name}": time_metric("range_ms", by_name[name], why=why) for name in sorted(by_name)}
    return {"step_ms": time_metric("step_ms", periods, why=why), **ranges}


def stream_roles(
    window: Window, table: StreamTable, meaning: RangeMap, given: Collection[int]
) -> tuple[dict[int, str], int | None]:
    """The streams' names by the records' numbers, and the only stream of forward operations, None for any. ``given``
    are the streams that the program named; ``table`` has their names, and numbers for the others. The program's name of
    a stream is kept, unless the map names that stream."""
    rule, found = meaning.streams, dict(table.names)
    forward = _found(rule.forward, table, _busiest(window, meaning, "forward"))
    schedule = _found(rule.schedule, table, _busiest(window, meaning, "schedule", but=forward))
    if schedule is not None and schedule != forward and (rule.schedule is not None or schedule not in given):
        found[schedule] = "schedule"
    if forward is not None and (rule.forward is not None or forward not in given):
        found[forward] = "forward"
    return found, forward if rule.forward is not None else None


def _found(rule: int | str | None, table: StreamTable, busiest: int | None) -> int | None:
    if rule is None or rule == "busiest":
        return busiest
    if isinstance(rule, int):
        return table.by_cupti(rule)
    return next((number for number, name in table.names.items() if name == rule), None)


def _busiest(window: Window, meaning: RangeMap, category: Category, *, but: int | None = None) -> int | None:
    """The stream with the most time in operations that ranges of the category launched. In forward ranges only kernels
    count."""
    inside = {rule.name for rule in meaning.ranges if rule.category == category}
    time: Counter[int] = Counter()
    for op in window.ops:
        counts = op.range in inside and (category != "forward" or op.kind == "kernel")
        if counts and op.stream not in (but, NOWHERE):
            time[op.stream] += op.end - op.start
    return max(sorted(time), key=lambda stream: time[stream], default=None)
