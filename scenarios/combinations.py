"""The combinations of modes that are refused, or that need a remark.

A pair of modes that is not in the table, ``combinations.csv``, runs with equal tokens.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterator
from functools import reduce
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from .problems import KeyPath
from .schema import Scenario

Finding = tuple[KeyPath, str]


class Mode(NamedTuple):
    """A mode is on where ``test`` holds for the value at ``key``, and the mode ``within`` is on."""

    key: tuple[str, ...]
    test: Callable[[Any], object] = bool
    within: str = ""

    def on(self, scenario: Scenario) -> bool:
        holds = bool(self.test(reduce(getattr, self.key, scenario)))
        return holds and (not self.within or MODES[self.within].on(scenario))


Verdict = Literal["refused", "engines", "runs"]


class Rule(NamedTuple):
    """A row of the table: two modes, why, and whether the pair is refused, is refused of all but the engines of other
    projects, or runs with a remark."""

    first: str
    second: str
    reason: str
    verdict: Verdict = "refused"


def _several(count: int) -> bool:
    return count > 1


MODES: dict[str, Mode] = {
    "overlap": Mode(("engine", "overlap"), lambda value: value is True),
    "mixed chunk": Mode(("engine", "mixed_chunk")),
    "unchunked prefill": Mode(("engine", "chunked_prefill_size"), lambda size: size is None),
    "radix cache": Mode(("engine", "radix_cache")),
    "speculation": Mode(("engine", "speculative"), lambda spec: spec.algorithm != "none"),
    "speculation v1": Mode(("engine", "speculative", "mode"), lambda mode: mode == "v1", "speculation"),
    "speculation v2": Mode(("engine", "speculative", "mode"), lambda mode: mode == "v2", "speculation"),
    "draft trees": Mode(("engine", "speculative", "topk"), _several, "speculation"),
    "pages": Mode(("engine", "page_size"), _several),
    "graphs": Mode(("engine", "cuda_graph")),
    "own model runner": Mode(("engine", "model_runner"), lambda runner: runner == "own"),
    "hisparse": Mode(("engine", "hisparse"), lambda hisparse: hisparse.enabled),
    "pipeline": Mode(("engine", "pipeline"), lambda pipeline: pipeline.stages > 1),
    "dynamic chunks": Mode(("engine", "pipeline", "dynamic_chunks")),
    "disaggregation": Mode(("engine", "disaggregation"), lambda pair: pair.mode != "none"),
    "data-parallel ranks": Mode(("engine", "data_parallel", "ranks"), _several),
    "shared MLP": Mode(
        ("engine", "data_parallel", "mlp"), lambda mlp: mlp == "shared", "data-parallel ranks"
    ),
    "fake transfer": Mode(
        ("engine", "disaggregation", "transfer"), lambda transfer: transfer == "fake", "disaggregation"
    ),
    "replicas": Mode(("engine", "replicas"), _several),
    "encoder-decoder": Mode(("workload", "encoder_tokens"), lambda tokens: tokens is not None),
    "block diffusion": Mode(("engine", "block_diffusion"), lambda blocks: blocks.enabled),
    "split prefill": Mode(("engine", "split_prefill"), lambda split: split.enabled),
    "deferred": Mode(("engine", "deferred")),
    "embedding": Mode(("engine", "embedding")),
    "grammar": Mode(("workload", "sampling", "grammar"), lambda grammar: grammar is not None),
    "logprobs": Mode(("workload", "sampling", "logprobs")),
    "prompt logprobs": Mode(("workload", "sampling", "prompt_logprobs")),
    "hidden states": Mode(("workload", "sampling", "hidden_states")),
    "controls": Mode(("workload", "controls")),
    "minimum length": Mode(("workload", "sampling", "min_new_tokens")),
    "measured host": Mode(("device", "host"), lambda host: host == "measured"),
    "values none": Mode(("device", "values"), lambda values: values == "none"),
}


_TABLE = files(__package__).joinpath("combinations.csv").read_text(encoding="utf-8")
RULES: tuple[Rule, ...] = tuple(map(Rule._make, csv.reader(_TABLE.splitlines()[1:])))


def findings(
    scenario: Scenario,
    rules: tuple[Rule, ...] = RULES,
    *,
    verdict: Verdict = "refused",
    broken: Collection[KeyPath] = (),
    overridden: Collection[KeyPath] = (),
) -> Iterator[Finding]:
    """The combinations of a scenario that have this ``verdict``, each with a key and the reason. The key is that of the
    mode that an ``overridden`` key switched on, if any. Modes whose keys are ``broken`` are skipped."""
    for rule in rules:
        if rule.verdict != verdict or not _on(scenario, rule.first, rule.second):
            continue
        first, second = MODES[rule.first].key, MODES[rule.second].key
        if not among(first, broken) and not among(second, broken):
            late = among(second, overridden) and not among(first, overridden)
            reason = f"{rule.first} cannot be combined with {rule.second}: {rule.reason}"
            yield second if late else first, reason


def overlaps(scenario: Scenario) -> bool:
    """Whether the scenario's loop overlaps: as given, or with ``auto`` wherever no mode forbids it."""
    if scenario.engine.overlap != "auto":
        return scenario.engine.overlap
    return not any(
        "overlap" in (rule.first, rule.second) and _on(scenario, *({rule.first, rule.second} - {"overlap"}))
        for rule in RULES
        if rule.verdict == "refused"
    )


def staged(scenario: Scenario) -> bool:
    """Whether the model runs as a pipeline."""
    return MODES["pipeline"].on(scenario)


def routed(scenario: Scenario) -> bool:
    """Whether the workers are behind a router."""
    return scenario.engine.disaggregation.mode != "none" or scenario.engine.replicas > 1


def among(key: KeyPath, paths: Collection[KeyPath]) -> bool:
    """Whether one of ``paths`` is the key, its section, or a key within it."""
    return any(key[: len(path)] == path[: len(key)] for path in paths)


def _on(scenario: Scenario, *modes: str) -> bool:
    return all(MODES[mode].on(scenario) for mode in modes)
