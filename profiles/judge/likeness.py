"""Whether two results can be compared, and have the same tokens: both must be of the same question, with the same
capacity of the engine; where tokens differ, which is the first that does."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import BaseModel

from ...sched.observe import Observer, StepInfo
from ..record.result import Abstained, Result

if TYPE_CHECKING:
    from ...sched.request import Request

QUESTION: Final = ("model", "device", "workload", "measure")
CAPACITY: Final = ("engine.kv_tokens", "engine.max_running_requests")
# Keys that change which requests share a step, but not what a step does.
BATCHING: Final = frozenset(
    {"engine.pipeline.async_depth", "engine.pipeline.dynamic_chunks", "engine.pipeline.smooth_factor"}
)
OWN: Final = "schedbench"  # the scheduler that is no other project's
_FREE: Final = frozenset({"measure.repeat", "measure.seed"})  # the caller pairs runs of equal seeds
_MISSING: Final = object()
# Two sources' log probabilities may differ by this: in float32 they have seven digits, and errors of sums grow with the
# vocabulary. Another row, position or temperature changes them by more.
LOGPROB_ERROR: Final = 1e-4
_NOT_NAMED: Final = (
    "what differs was not kept: tokens, an embedding, a log probability, or a tag of a finished request's KV that does"
    " not add up"
)
_LONGEST: Final = 300  # characters of a value in a message
_LONGEST_REASON: Final = 120  # of the end of a request
_NUMBERS: Final = re.compile(r"\d+")

Steps = Mapping[str, Sequence[int]]


class ScenarioDifference(NamedTuple):
    """``key`` is dotted, as in the scenario or the result; values are those of JSON."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        a, b = (text if len(text := repr(x)) <= _LONGEST else f"{text[:_LONGEST]}..." for x in self[1:])
        return f"{self.key}: {a} against {b}"


class LikenessError(ValueError):
    """Two sides are of different questions, or two runs of one side are."""

    def __init__(self, differences: Collection[ScenarioDifference], names: str = "A and B") -> None:
        listed = "".join(f"\n  {difference}" for difference in differences)
        super().__init__(f"{names} are not alike and cannot be compared:{listed}")


def unlike_questions(
    a: Mapping[str, Any], b: Mapping[str, Any], *, varied: Collection[str] = (), free: Collection[str] = _FREE
) -> tuple[ScenarioDifference, ...]:
    """Differences between the questions of two expanded scenarios. A key that only one version has is ignored. The
    engine may differ; its capacity only where ``varied``, the keys that a side sets, names it."""
    return tuple(
        difference
        for difference in _differences(a, b)
        if (difference.key.partition(".")[0] in QUESTION and difference.key not in free)
        or (difference.key in CAPACITY and difference.key not in varied)
    )


def unlike(a: Result, b: Result, *, varied: Collection[str] = ()) -> tuple[ScenarioDifference, ...]:
    """Everything that keeps two results from being compared."""
    return (
        *(d for d in _of_parts("labels", a.labels, b.labels) if not _allowed(d)),
        *_of_parts("hardware", a.hardware, b.hardware),
        *unlike_questions(a.scenario.expanded, b.scenario.expanded, varied=varied),
        *_edited(a, b, QUESTION),
    )


def unlike_runs(a: Result, b: Result) -> tuple[ScenarioDifference, ...]:
    """Everything that keeps two results from being runs of one side: also another engine, relay or version of the
    program."""
    return *unlike(a, b), *_of_parts("tool", a.tool, b.tool), *engine_differences(a, b)


def _edited(a: Result, b: Result, sections: Collection[str]) -> Iterator[ScenarioDifference]:
    """Files that both runs read for these sections of the scenario, with different contents. Files of other names
    differ by their key of the scenario."""
    contents = {(part.key, part.file): part.sha256 for part in b.scenario.inputs}
    for part in a.scenario.inputs:
        other = contents.get((part.key, part.file), part.sha256)
        if other != part.sha256 and part.key.partition(".")[0] in sections:
            yield ScenarioDifference(f"{part.key}, contents of {part.file}", part.sha256[:16], other[:16])


def _allowed(difference: ScenarioDifference) -> bool:
    """Speculation may be compared with none, unless acceptance is simulated. Ranks in processes have the same tokens
    and counts as ranks in one process; what they lack abstains. Engines are what is compared."""
    lossless = difference.key == "labels.acceptance" and "simulated" not in (difference.a, difference.b)
    return lossless or difference.key.split(".")[1] in ("engine", "world")


def unlike_environments(a: Result, b: Result) -> tuple[ScenarioDifference, ...]:
    """Differences of the environments, which change measured times but not emulated ones. Without graphs, none was
    traced in another way."""
    plain_a, plain_b = (
        {
            key: value
            for key, value in result.environment.items()
            if not isinstance(value, dict) and (key, value) != ("cuda_graph_trace", "none")
        }
        for result in (a, b)
    )
    return tuple(_differences(plain_a, plain_b))


def engine_differences(a: Result, b: Result) -> tuple[ScenarioDifference, ...]:
    """The differences of the engine and the relay, which are what is compared. Of an engine of another project, without
    those of what was replaced around it."""
    engine = (
        difference
        for difference in _differences(a.scenario.expanded, b.scenario.expanded)
        if difference.key.startswith("engine.") and not difference.key.startswith("engine.relay")
    )
    files = _edited(a, b, ["engine"])
    return *engine, *_of_parts("relay", a.relay, b.relay), *files, *_sources(a, b)


def _sources(a: Result, b: Result) -> tuple[ScenarioDifference, ...]:
    """The differences of the engines of other projects; that of the files only where there is no other."""
    if a.labels.engine is None or b.labels.engine is None:
        names = [OWN if side.labels.engine is None else side.labels.engine.name for side in (a, b)]
        return (ScenarioDifference("labels.engine", *names),) if names[0] != names[1] else ()
    parts = _of_parts("labels.engine", a.labels.engine, b.labels.engine)
    edge = "labels.engine.edge."  # what was replaced; a folder without git has neither a ref nor changes
    found = [d for d in parts if not d.key.startswith(edge) and None not in (d.a, d.b)]
    return tuple(d for d in found if len(found) == 1 or d.key != "labels.engine.sha256")


def _of_parts(name: str, a: BaseModel, b: BaseModel) -> Iterator[ScenarioDifference]:
    return _differences(a.model_dump(mode="json"), b.model_dump(mode="json"), f"{name}.")


def _differences(
    a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = ""
) -> Iterator[ScenarioDifference]:
    for key in sorted({*a, *b}):
        x, y = a.get(key, _MISSING), b.get(key, _MISSING)
        if isinstance(x, dict) and isinstance(y, dict):
            yield from _differences(x, y, f"{prefix}{key}.")
        elif x != y and _MISSING not in (x, y):
            yield ScenarioDifference(f"{prefix}{key}", x, y)


class Divergence(NamedTuple):
    """The first difference. ``position`` counts output tokens from 0; a token is None where that side had ended.
    Steps count from the workload's first; they are None where a side did not keep them. ``request`` is None where
    digests differ and tokens were not kept or are the same; ``beside`` says then what differs."""

    seed: int
    request: str | None = None
    position: int | None = None
    token_a: int | None = None
    token_b: int | None = None
    step_a: int | None = None
    step_b: int | None = None
    margin_a: float | None = None  # of the best score over the second at that token; None where not computed
    margin_b: float | None = None
    beside: str | None = None


class TokenSteps(Observer):
    """Observes which step made each token."""

    def __init__(self) -> None:
        self.steps: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        self._new: list[tuple[str, int]] = []
        self._first: int | None = None

    def launched(self, info: StepInfo) -> None:
        if self._first is None:
            self._first = info.step

    def tokens(self, requests: Sequence[Request], count: int) -> None:
        self._new += [(request.id, count) for request in requests]

    def settled(self, info: StepInfo) -> None:
        step = info.step - (self._first or 0)
        for request, count in self._new:
            self.steps[request].extend([step] * count)
        self._new.clear()


def comparable(a: Result, b: Result) -> bool:
    """Whether both results have meaningful tokens."""
    return not (isinstance(a.outputs, Abstained) or isinstance(b.outputs, Abstained))


def same_tokens(a: Result, b: Result) -> bool:
    if not comparable(a, b) or a.outputs == b.outputs:
        return comparable(a, b)
    return not any(token_differences(a, b)) and not any(value_differences(a, b))


def value_differences(a: Result, b: Result) -> Iterator[str]:
    """What differs beside tokens where digests do: the first log probability of each request, if both results kept
    them. Those of our own scheduler are equal in all modes."""
    if a.outputs == b.outputs:
        return
    if not all(any(row.kept_logprobs for row in result.requests) for result in (a, b)):
        yield _NOT_NAMED
        return
    error = 0 if a.labels.engine is None and b.labels.engine is None else LOGPROB_ERROR
    workload: Any = a.scenario.expanded["workload"]
    kept_b = {row.id: row.kept_logprobs for row in b.requests}
    named = False
    for row in a.requests:
        before = row.prompt_tokens - 1 if workload["sampling"]["prompt_logprobs"] else 0
        for place, (x, y) in enumerate(zip_longest(row.kept_logprobs, kept_b.get(row.id, ()))):
            if x is None or y is None or not (x == y or abs(x - y) <= error):
                token = f"output token {place - before}" if place >= before else f"prompt token {place + 1}"
                here, there = ("none" if score is None else f"{score:.6g}" for score in (x, y))
                yield f"request {row.id}: log probability of {token} is {here}, the other {there}"
                named = True
                break
    if not (named or error or any(token_differences(a, b))):
        yield _NOT_NAMED


def first_divergence(
    a: Result, b: Result, *, seed: int, steps_a: Steps | None = None, steps_b: Steps | None = None
) -> Divergence | None:
    """The earliest difference in time, or in request order where steps are unknown; None where digests agree."""
    if same_tokens(a, b):
        return None
    found = [
        Divergence(
            seed,
            request,
            position,
            x,
            y,
            _step(steps_a, request, position),
            _step(steps_b, request, position),
        )
        for request, position, x, y in token_differences(a, b)
    ]

    def when(where: Divergence) -> float:
        steps = [step for step in (where.step_a, where.step_b) if step is not None]
        return min(steps, default=float("inf"))

    return min(found, key=when, default=Divergence(seed, beside=next(value_differences(a, b), None)))


def token_differences(a: Result, b: Result) -> Iterator[tuple[str, int, int | None, int | None]]:
    """The first differing position of each request whose tokens were kept and differ."""
    tokens_b = {row.id: row.token_ids or () for row in b.requests}
    for row in a.requests:
        pairs = zip_longest(row.token_ids or (), tokens_b.get(row.id, ()))
        for position, (x, y) in enumerate(pairs):
            if x != y:
                yield row.id, position, x, y
                break


def other_ends(found: Result, expected: Result) -> Iterator[tuple[str, str]]:
    """The requests that ended otherwise, and in words how. Numbers in reasons are not compared: an engine may write
    times there."""
    ends = {row.id: row for row in expected.requests}
    for row in found.requests:
        end = ends.get(row.id, row)
        if (end.status, _NUMBERS.sub("", end.reason)) != (row.status, _NUMBERS.sub("", row.reason)):
            here, there = (f"{one.status} ({in_brief(one.reason)})" for one in (row, end))
            yield row.id, f"request {row.id} ended {here} instead of {there}"


def in_brief(reason: str) -> str:
    """The reason of a request's end in one line: an engine may give the whole state of a parser."""
    line = reason.partition("\n")[0][:_LONGEST_REASON]
    return line if line == reason else f"{line}…"


def _step(steps: Steps | None, request: str, position: int) -> int | None:
    known = steps.get(request, ()) if steps else ()
    return known[position] if position < len(known) else None
