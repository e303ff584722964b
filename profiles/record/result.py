"""The result document of one run: immutable and versioned.

Everything outside ``run`` and ``environment`` is a function of the scenario and the program, so an emulated
run repeats byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import from_json

from ...scenarios.fields import Achieved
from ...scenarios.problems import dotted, show
from .conclusion import conclusion
from .definitions import DEFINITIONS, Direction
from .files import write_whole
from .provenance import (
    Count,
    HardwarePart,
    Instant,
    Labels,
    Number,
    RelayPart,
    ResultModel,
    RunPart,
    ScenarioPart,
    Tool,
    omitted,
)
from .timeline import HazardKind, OrderKind

# History: 1.0 the first.
SCHEMA_VERSION: Final = "1.0"

OWN_CLOCKS: Final = "the ranks' clocks are their own: no link was emulated"


class ResultError(ValueError):
    """A file is no result document, or one of an unknown version."""


class Abstained(ResultModel):
    """A number that cannot be given, and the reason."""

    value: None = None
    abstained: str


class Metric(ResultModel):
    """``values`` has one entry per timed pass: the value, or the mean of a distribution. The rest describes the
    distribution of the ``n`` samples of a pass and is absent for plain values: of several passes, the median of ``n``
    and of each percentile, and the extremes of all."""

    unit: str
    direction: Direction
    exact: bool = False  # repeats byte for byte
    values: tuple[Number, ...]
    n: Count | None = None
    min: Number | None = None
    max: Number | None = None
    p50: Number | Abstained | None = None
    p90: Number | Abstained | None = None
    p95: Number | Abstained | None = None
    p99: Number | Abstained | None = None

    @property
    def value(self) -> float:
        """The median of the passes."""
        return float(median(self.values))


STREAM_WAIT: Final = "cudaStreamWaitEvent"  # the call of a row that waits on a stream, not on the host
PROGRAM: Final = "program"  # the kind of the only step of a watched program whose ranges define none


class CountSummary(ResultModel):
    """Counts per step over all steps of a kind."""

    median: Number
    mean: Number
    max: Count
    steps_with: Count


class KindCounts(ResultModel):
    """Steps of a kind and, by stream, the counts of h2d, d2h, d2d, memset, sync and kernel, and of the finer
    h2d_pinned, h2d_pageable, h2d_blocking and their d2h likes. What never happened is left out."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, dict[str, CountSummary]] = Field(init=False)

    steps: Count

    @property
    def streams(self) -> dict[str, dict[str, CountSummary]]:
        return self.__pydantic_extra__


class SitePart(ResultModel):
    file: str
    function: str
    line: Count
    statement: str


class CopyRow(ResultModel):
    """Copies of one source line that are alike. ``kind`` is the step's kind, ``none`` outside of steps; directions are
    h2d, d2h, d2d, and ``kernel``, a kernel that touched pinned host memory. Sends between ranks are counted per step
    alone."""

    site: SitePart | None
    range: str
    kind: str
    stream: str
    direction: str
    host_memory: str
    blocking: bool
    count: Count
    steady: Count  # of count, those in steady decodes
    bytes: Count
    host_us: Number  # its calls waited for the device
    exposed_us: Number

    @property
    def what(self) -> str:
        """Like ``h2d pageable blocking``."""
        direction = "kernel copy" if self.direction == "kernel" else self.direction
        return " ".join(filter(None, (direction, self.host_memory, "blocking" * self.blocking)))


class SyncRow(ResultModel):
    """Syncs, waits of streams, and other calls that the host waited in, of one source line."""

    site: SitePart | None
    range: str
    kind: str
    stream: str
    call: str
    sync: bool  # its purpose is to wait
    count: Count
    steady: Count  # of count, those in steady decodes
    host_us: Number
    exposed_us: Number

    @property
    def what(self) -> str:
        return self.call


class IdlePart(ResultModel):
    """The time between forwards, split into ``IDLE_PARTS``."""

    host_late_us: Number
    launch_latency_us: Number  # of host late
    unnamed_host_us: Number  # of host late, in no range
    dependency_us: Number
    kernel_gap_us: Number
    no_work_us: Number
    residue_us: Number


class CriticalPathPart(ResultModel):
    """What bounded the time of all steps of a kind; ``parts_ns`` add up to ``total_ns``."""

    steps: Count
    total_ns: Count
    parts_ns: dict[str, Count]


class EngagementPart(ResultModel):
    taken: Count
    eligible: Count


class RankPart(ResultModel):
    name: str
    role: str
    per_step: dict[str, KindCounts]
    idle: IdlePart | Abstained
    metrics: dict[str, Metric | Abstained]
    critical_path: Mapping[str, CriticalPathPart] = {}


class RequestRow(ResultModel):
    """Instants are ns of the run's clock."""

    id: str
    arrival: Instant
    first_token: Instant | None
    finish: Instant | None
    prompt_tokens: Count
    output_tokens: Count
    status: Literal["finished", "refused", "aborted", "failed", "cancelled"]
    reason: str
    token_ids: tuple[Count, ...] | None = Field(default=None, exclude_if=lambda ids: ids is None)
    # Of the prompt, then of the output. Documents have the digest of them alone.
    kept_logprobs: tuple[float, ...] = Field(default=(), exclude=True)


class Outputs(ResultModel):
    digest: str


class HazardAccess(ResultModel):
    """``stream`` is "host" where the host itself touched pinned memory. Documents say in words whether it is a
    write. ``callers`` are the lines that called that of a finding's later access, the innermost first."""

    op: str
    write: bool = Field(default=False, exclude=True)
    site: SitePart | None
    stream: str
    callers: tuple[SitePart, ...] = omitted(())


class HazardFinding(ResultModel):
    """``first`` was issued before ``second`` and nothing orders the two. ``second`` is None for memory whose last write
    is ``first`` and which is never read. ``missing`` is the explanation in words; documents have no other kind."""

    kind: HazardKind | None = Field(default=None, exclude=True)
    resource: str
    first: HazardAccess
    second: HazardAccess | None
    missing: str

    @property
    def identity(self) -> tuple[str, str]:
        """Equal for a finding that other callers, another rank or another stream of that name have shown, too."""
        return self.resource, self.missing


class Hazards(ResultModel):
    """``known``: those that the relay state declares and this run showed; ``findings`` are all others."""

    known: tuple[str, ...] = ()
    findings: tuple[HazardFinding, ...] = ()


class RangePart(ResultModel):
    """``follows`` is the constant that the metric follows most, with their rank correlation."""

    low: Number
    high: Number
    follows: str
    correlation: Number


class RangesPart(ResultModel):
    """The extremes of metrics, as means over the repeats, under draws of the hardware's constants from their ranges."""

    draws: Count
    metrics: dict[str, RangePart]


class WorthRow(ResultModel):
    """What a run has if one thing is changed in it and everything else is equal: the differences to the run as it is.

    ``site`` is None for the host phase ``phase``. ``what``: what the line does; ``kinds``: in which kinds of steps.
    ``needed``: it orders accesses that would race without it, so that only an order that costs less can gain.
    ``hidden``: no figure gains from it; the figures are then the same with any further time up to ``room_us[0]`` per
    step, and lose with ``room_us[1]``, if such limits were asked for. A figure that either run lacks is None."""

    site: SitePart | None = None
    phase: str = ""
    what: str
    kinds: tuple[str, ...] = ()
    change: Literal["no wait", "pinned", "absent", "half"]
    output_throughput_pct: Number | None = None
    ttft_ms: Number | None = None
    tpot_ms: Number | None = None
    step_us: Number | None = None  # the time of the whole run by the steps of the run as it is
    idle_us_per_step: Number | None = None  # between forwards
    needed: bool = omitted(False)
    hidden: bool = False
    room_us: tuple[Number, Number | None] | None = None
    abstained: str = ""  # why there are no figures


class WorthPart(ResultModel):
    """Counterfactual runs, largest gain first, those of needed lines behind the others. ``base`` has the figures of
    the run without a change."""

    base: dict[str, Number | None]
    rows: tuple[WorthRow, ...]


class OrderingRow(ResultModel):
    """A source line that orders streams, the host or the reuse of memory, in a run that is watched for hazards.
    ``needed``: without this line alone, two accesses of the run would have no order."""

    kind: OrderKind
    site: SitePart
    needed: bool


class Result(ResultModel):
    schema_version: Literal["1.0"] = SCHEMA_VERSION
    tool: Tool
    run: RunPart
    environment: dict[str, JsonValue]
    labels: Labels
    scenario: ScenarioPart
    workload: Achieved | Abstained
    relay: RelayPart
    hardware: HardwarePart
    metrics: dict[str, Metric | Abstained]
    per_step: dict[str, KindCounts]
    copies: tuple[CopyRow, ...]
    syncs: tuple[SyncRow, ...]
    idle: IdlePart | Abstained
    # By kind of step; empty of a real device, and of several.
    critical_path: Mapping[str, CriticalPathPart] = omitted({})
    engagement: Mapping[str, EngagementPart] = {}
    ranks: tuple[RankPart, ...] = ()
    requests: tuple[RequestRow, ...]
    outputs: Outputs | Abstained
    hazards: Hazards | Abstained
    ordering: tuple[OrderingRow, ...] = omitted(())
    not_asked: Mapping[str, str] = omitted({})  # by kind of step, why its budget does not apply to this run
    ranges: RangesPart | None = omitted()  # where they were asked for
    worth: WorthPart | None = omitted()  # likewise

    @property
    def one_clock(self) -> bool:
        """Whether the instants of different ranks can be compared."""
        return not (isinstance(self.idle, Abstained) and self.idle.abstained == OWN_CLOCKS)

    @property
    def uncounted(self) -> Mapping[str, str]:
        """By kind of step, the reason for which its copies, syncs and kernels are left out."""
        engine = self.labels.engine
        return {} if engine is None else engine.edge.uncounted

    @property
    def per_step_of_ranks(self) -> tuple[dict[str, KindCounts], ...]:
        """The counts of all ranks, whose steps ``copies`` and ``syncs`` are of."""
        return tuple(rank.per_step for rank in self.ranks) or (self.per_step,)

    @property
    def undeclared(self) -> bool:
        """Whether the run showed a hazard that its relay state does not declare."""
        return isinstance(self.hazards, Hazards) and bool(self.hazards.findings)

    @property
    def unrecorded(self) -> str | None:
        """The reason for which there are no source lines, where copies and syncs were not recorded; else None."""
        if self.copies or self.syncs:
            return None
        idle = next((rank.idle for rank in self.ranks), self.idle)
        return idle.abstained if isinstance(idle, Abstained) else None

    def steps(self) -> Counter[str]:
        """The number of steps of each kind that ``copies`` and ``syncs`` are of."""
        kinds: Counter[str] = Counter()
        for part in self.per_step_of_ranks:
            kinds.update({kind: counts.steps for kind, counts in part.items()})
        return kinds

    def document(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, as in the file. Absent fields are left out; the conclusion follows from the
        others."""
        document: dict[str, Any] = self.model_dump(mode="json")
        for label in ("acceptance", "capture", "engine", "world"):
            if document["labels"][label] is None:
                del document["labels"][label]
        if self.relay.loop is None:
            del document["relay"]["loop"]
        for metric in document["metrics"].values():
            for name in [name for name, value in metric.items() if value is None and name != "value"]:
                del metric[name]
        return document | {"conclusion": conclusion(document)}

    def to_json(self) -> str:
        return canonical(self.document())

    def write(self, path: Path) -> None:
        write_whole(path, self.to_json())

    @classmethod
    def from_json(cls, text: str | bytes, *, name: str = "result") -> Self:
        """Raises ResultError, naming ``name`` and the first thing that is wrong."""
        try:
            document = from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise ResultError(f"{name}: not JSON: {error}") from None
        return cls.from_document(document, name=name)

    @classmethod
    def from_document(cls, document: object, *, name: str = "result") -> Self:
        """As ``from_json``, for a parsed document."""
        if not isinstance(document, dict) or "schema_version" not in document:
            raise ResultError(f"{name}: not a schedbench result: no schema_version")
        if "conclusion" in document and "per_step" not in document:
            raise ResultError(f"{name}: the document of another command, not the result of a run")
        if document["schema_version"] != SCHEMA_VERSION:
            said = f"schema_version {show(document['schema_version'])} is not understood"
            raise ResultError(f"{name}: {said}; this schedbench reads {SCHEMA_VERSION}")
        try:
            result = cls.model_validate({key: document[key] for key in document if key != "conclusion"})
        except ValidationError as error:
            first, *others = error.errors(include_url=False)
            more = f" (and {len(others)} more)" if others else ""
            raise ResultError(f"{name}: {dotted(first['loc'])}: {first['msg']}{more}") from None
        for metric, found in result.metrics.items():
            entry = DEFINITIONS.get(metric.partition(".")[0])
            if isinstance(found, Metric) and entry:
                here, there = (f"{one.unit}, {one.direction}" for one in (found, entry))
                if here != there:
                    where = f"{name}: metrics.{metric}: unit and direction"
                    raise ResultError(f"{where} are {here} instead of {there}")
        return result


def read(path: Path) -> Result:
    """Raises ResultError when the file is missing, unreadable, junk, or of an unknown version."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ResultError(f"{path}: not a regular file")
        return Result.from_json(path.read_bytes(), name=str(path))
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror or error}") from None


def canonical(document: dict[str, Any]) -> str:
    """JSON with sorted keys; a line per top-level entry and per row of a list, so that files diff well. Characters
    that UTF-8 cannot encode, such as bytes of a file name, become question marks."""
    entries = (f"{_dump(key)}: {_rows(document[key])}" for key in sorted(document))
    text = "{\n" + ",\n".join(entries) + "\n}\n"
    return text.encode("utf-8", "replace").decode()


def _rows(value: object) -> str:
    if not isinstance(value, list) or not value:
        return _dump(value)
    return "[\n " + ",\n ".join(map(_dump, value)) + "\n]"


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def digest(outputs: Iterable[tuple[str, Sequence[float]]]) -> str:
    """sha256 over (request id, output token ids or embedding) in request order. Equal digests mean equal outputs."""
    running = hashlib.sha256()
    for request, tokens in outputs:
        running.update(json.dumps([request, list(tokens)], separators=(",", ":")).encode())
        running.update(b"\n")
    return running.hexdigest()
