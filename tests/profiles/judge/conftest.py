"""Synthetic results, steps, and sides that return results from a list."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from schedbench.profiles.judge.engagement import StepPrint
from schedbench.profiles.judge.trials import Sample
from schedbench.profiles.record.result import Result

SAMPLE = Path(__file__).parent.parent / "sample_result.json"
QUESTION = {
    "name": "mixed",
    "model": {"preset": "tiny-llama", "dtype": "bfloat16"},
    "device": {"hardware": "h200"},
    "engine": {
        "overlap": True,
        "kv_tokens": 64,
        "max_running_requests": 4,
        "speculative": {"algorithm": "none"},
    },
    "workload": {"requests": 2},
    "measure": {"seed": 0, "repeat": 1},
}
MEASURED = {"labels.emulated": False, "labels.host": "measured"}
OTHER_TOKENS = {"outputs.digest": "0" * 64}
TALLY = {"median": 1.0, "mean": 1.0, "max": 1, "steps_with": 5}  # of a counter, once in every step
STEPS = tuple(StepPrint("decode", 4, 4, f"row{at}", "shape") for at in range(10))
OTHER_STEPS = tuple(step._replace(rows=f"{step.rows}'", shape="other") for step in STEPS)


def altered(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the document with changes such as ``{"labels.emulated": False}``; dots in a metric's name are not
    split."""
    for path, value in changes.items():
        *sections, last = path.split(".")
        node = document
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return document


@pytest.fixture
def result() -> Callable[..., Result]:
    """Makes the sample result with changes, as the result of a complete scenario."""

    def make(changes: dict[str, Any] | None = None, /, *, seed: int = 0, throughput: float = 100.0) -> Result:
        document = json.loads(SAMPLE.read_text())
        document["scenario"]["expanded"] = json.loads(json.dumps(QUESTION))
        document["scenario"]["expanded"]["measure"]["seed"] = seed
        document["metrics"]["output_throughput"]["values"] = [throughput]
        return Result.from_document(altered(document, changes or {}))

    return make


def seeded(result: Callable[..., Result], seeds: Iterable[int]) -> list[Sample]:
    """Samples of these seeds, whose throughputs differ."""
    return [Sample(result(seed=seed, throughput=100.0 + seed)) for seed in seeds]


def rows(**tokens: list[int]) -> list[dict[str, Any]]:
    """Rows of requests that finished with these tokens, by id."""
    times = {"arrival": 0, "first_token": 1, "finish": 2, "prompt_tokens": 3}
    ended = {"status": "finished", "reason": "length"}
    return [
        {"id": name, "output_tokens": len(ids), "token_ids": ids, **times, **ended}
        for name, ids in tokens.items()
    ]


@dataclass
class FakeSide:
    """Returns one result of a list per run, whatever the seed. An entry that is not a sample is raised."""

    label: str
    samples: list[Sample | BaseException]
    asked: list[int | None] = field(default_factory=list)
    seeds: Sequence[int] | None = None
    spreads: bool = False

    def run(self, seed: int | None) -> Sample:
        self.asked.append(seed)
        sample = self.samples[min(len(self.asked), len(self.samples)) - 1]
        if isinstance(sample, BaseException):
            raise sample
        return sample

    def all(self) -> Sequence[Sample]:
        return [s for s in self.samples if isinstance(s, Sample)] if self.seeds is not None else ()

    def margin(self, seed: int, request: str, position: int) -> float | None:
        return position / 10 if request and seed == 0 else None


@pytest.fixture
def side() -> Callable[..., FakeSide]:
    return FakeSide
