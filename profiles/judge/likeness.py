"""May two results be compared? What is asked must be the same; how the engine answers is what is compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ..record.result import Result

QUESTION: Final = ("model", "device", "workload", "measure")
CAPACITY: Final = ("engine.kv_tokens", "engine.max_running_requests")
# What shows in which requests share a step, and in nothing that a step does.
BATCHING: Final = frozenset(
    {"engine.pipeline.async_depth", "engine.pipeline.dynamic_chunks", "engine.pipeline.smooth_factor"}
)
_FREE: Final = frozenset(
    {"measure.repeat", "measure.seed"}
)  # how often, and which draws: paired by the caller
_MISSING: Final = object()
_LONGEST: Final = 300  # letters of a value in a message


class ScenarioDifference(NamedTuple):
    """``key`` is dotted, as in the scenario or the result; values are as JSON knows them."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.a)} against {_short(self.b)}"


class LikenessError(ValueError):
    """Two sides answer different questions."""

    def __init__(self, differences: Collection[ScenarioDifference]) -> None:
        self.differences = tuple(differences)
        listed = "".join(f"\n  {difference}" for difference in differences)
        super().__init__(f"A and B are not alike and cannot be compared:{listed}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def unlike_questions(
    a: Mapping[str, Any], b: Mapping[str, Any], *, varied: Collection[str] = (), free: Collection[str] = _FREE
) -> tuple[ScenarioDifference, ...]:
    """Of two expanded scenarios. A key that only one version knows is no difference. The engine may differ, its
    capacity only where that was asked for: ``varied`` has the keys that a side set."""
    return tuple(
        difference
        for difference in _differences(a, b)
        if (difference.key.partition(".")[0] in QUESTION and difference.key not in free)
        or (difference.key in CAPACITY and difference.key not in varied)
    )


def unlike(a: Result, b: Result, *, varied: Collection[str] = ()) -> tuple[ScenarioDifference, ...]:
    """Everything that keeps two results from being compared."""
    return (
        *(
            ScenarioDifference(f"labels.{d.key}", d.a, d.b)
            for d in _of_parts(a.labels, b.labels)
            if not _allowed(d)
        ),
        *(ScenarioDifference(f"hardware.{d.key}", d.a, d.b) for d in _of_parts(a.hardware, b.hardware)),
        *unlike_questions(a.scenario.expanded, b.scenario.expanded, varied=varied),
    )


def _allowed(difference: ScenarioDifference) -> bool:
    """Speculation against none is a question like any other, unless lots decide what is accepted. Ranks in processes
    have the tokens and counts of ranks in one, and what they have not is told as that."""
    lossless = difference.key == "acceptance" and "simulated" not in (difference.a, difference.b)
    return lossless or difference.key == "world"


def unlike_environments(a: Result, b: Result) -> tuple[ScenarioDifference, ...]:
    """What changes measured times; emulated ones come from the hardware profile alone."""
    plain_a, plain_b = (
        {key: value for key, value in result.environment.items() if not isinstance(value, dict)}
        for result in (a, b)
    )
    return tuple(_differences(plain_a, plain_b))


def engine_differences(a: Result, b: Result) -> tuple[ScenarioDifference, ...]:
    """What is compared, as far as the scenario and the relay say so."""
    engine = (
        difference
        for difference in _differences(a.scenario.expanded, b.scenario.expanded)
        if difference.key.startswith("engine.") and not difference.key.startswith("engine.relay")
    )
    relay = (ScenarioDifference(f"relay.{d.key}", d.a, d.b) for d in _of_parts(a.relay, b.relay))
    return *engine, *relay


def _of_parts(a: Any, b: Any) -> Iterator[ScenarioDifference]:
    return _differences(a.model_dump(mode="json"), b.model_dump(mode="json"))


def _differences(
    a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = ""
) -> Iterator[ScenarioDifference]:
    for key in sorted({*a, *b}):
        x, y = a.get(key, _MISSING), b.get(key, _MISSING)
        if isinstance(x, dict) and isinstance(y, dict):
            yield from _differences(x, y, f"{prefix}{key}.")
        elif x != y and _MISSING not in (x, y):
            yield ScenarioDifference(f"{prefix}{key}", x, y)
