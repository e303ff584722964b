"""The combinations of modes that are refused, or that need a remark.

A pair of modes that is not in the table runs, with equal tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal, NamedTuple

from .problems import KeyPath
from .schema import Scenario

Verdict = Literal["runs", "refused", "latest"]
Finding = tuple[KeyPath, str]


class Mode(NamedTuple):
    key: KeyPath
    on: Callable[[Scenario], bool]


class Rule(NamedTuple):
    """``latest``: runs with the relay state of that name only. ``runs``: runs, with a remark."""

    first: str
    second: str
    verdict: Verdict
    reason: str


MODES: dict[str, Mode] = {
    "overlap": Mode(("engine", "overlap"), lambda s: s.engine.overlap is True),
    "mixed chunk": Mode(("engine", "mixed_chunk"), lambda s: s.engine.mixed_chunk),
    "unchunked prefill": Mode(
        ("engine", "chunked_prefill_size"), lambda s: s.engine.chunked_prefill_size is None
    ),
    "radix cache": Mode(("engine", "radix_cache"), lambda s: s.engine.radix_cache),
    "speculation": Mode(("engine", "speculative"), lambda s: _speculates(s)),
    "speculation v1": Mode(("engine", "speculative", "mode"), lambda s: _speculates(s, "v1")),
    "speculation v2": Mode(("engine", "speculative", "mode"), lambda s: _speculates(s, "v2")),
    "draft trees": Mode(
        ("engine", "speculative", "topk"), lambda s: _speculates(s) and s.engine.speculative.topk > 1
    ),
    "pages": Mode(("engine", "page_size"), lambda s: s.engine.page_size > 1),
    "graphs": Mode(("engine", "cuda_graph"), lambda s: s.engine.cuda_graph),
    "hisparse": Mode(("engine", "hisparse"), lambda s: s.engine.hisparse.enabled),
    "pipeline": Mode(("engine", "pipeline"), lambda s: s.engine.pipeline.stages > 1),
    "dynamic chunks": Mode(
        ("engine", "pipeline", "dynamic_chunks"), lambda s: s.engine.pipeline.dynamic_chunks
    ),
    "disaggregation": Mode(("engine", "disaggregation"), lambda s: s.engine.disaggregation.mode != "none"),
    "data-parallel ranks": Mode(
        ("engine", "data_parallel", "ranks"), lambda s: s.engine.data_parallel.ranks > 1
    ),
    "shared MLP": Mode(
        ("engine", "data_parallel", "mlp"),
        lambda s: s.engine.data_parallel.ranks > 1 and s.engine.data_parallel.mlp == "shared",
    ),
    "fake transfer": Mode(
        ("engine", "disaggregation", "transfer"),
        lambda s: s.engine.disaggregation.mode != "none" and s.engine.disaggregation.transfer == "fake",
    ),
    "replicas": Mode(("engine", "replicas"), lambda s: s.engine.replicas > 1),
    "grammar": Mode(("workload", "sampling", "grammar"), lambda s: s.workload.sampling.grammar is not None),
    "logprobs": Mode(("workload", "sampling", "logprobs"), lambda s: s.workload.sampling.logprobs),
    "minimum length": Mode(
        ("workload", "sampling", "min_new_tokens"), lambda s: s.workload.sampling.min_new_tokens > 0
    ),
    "measured host": Mode(("device", "host"), lambda s: s.device.host == "measured"),
    "values none": Mode(("device", "values"), lambda s: s.device.values == "none"),
}

RULES: tuple[Rule, ...] = (
    Rule("mixed chunk", "unchunked prefill", "refused", "there is no chunk to mix decodes into"),
    Rule("mixed chunk", "speculation", "refused", "upstream's verify steps cannot be mixed with a chunk"),
    Rule("overlap", "speculation v1", "refused", "the v1 worker runs in the serial loop"),
    Rule("draft trees", "speculation v2", "refused", "upstream's v2 accepts chains only: topk 1"),
    Rule(
        "draft trees",
        "pages",
        "refused",
        "accepted branches would have to be moved within their pages, which this version does not do",
    ),
    Rule("speculation v2", "grammar", "runs", "batches with a grammar are not overlapped"),
    Rule("hisparse", "radix cache", "refused", "hot buffers belong to one request, prefixes to many"),
    Rule(
        "hisparse",
        "mixed chunk",
        "refused",
        "decodes mixed into a chunk would not run on",
    ),
    Rule(
        "hisparse",
        "speculation",
        "refused",
        "a hot buffer has one place for the newest token, a verify step has several",
    ),
    Rule("overlap", "pipeline", "refused", "each stage runs the serial loop, stages overlap one another"),
    Rule("pipeline", "speculation", "refused", "upstream has no known working form"),
    Rule("pipeline", "hisparse", "refused", "upstream's pipeline loop does not stage prompts"),
    Rule("dynamic chunks", "unchunked prefill", "refused", "there is no chunk whose size could follow"),
    Rule("pipeline", "measured host", "refused", "the ranks share one process, whose time is no rank's own"),
    Rule(
        "disaggregation",
        "pipeline",
        "refused",
        "workers of several stages would have to agree on every transfer",
    ),
    Rule("fake transfer", "speculation", "refused", "a draft would start from nothing"),
    Rule(
        "disaggregation", "hisparse", "runs", "KV is on the host where requests decode, not where prompts are"
    ),
    Rule("disaggregation", "mixed chunk", "runs", "prefill workers have no decodes to mix in"),
    Rule("disaggregation", "radix cache", "runs", "the cache is the prefill workers'"),
    Rule(
        "disaggregation",
        "measured host",
        "refused",
        "the workers share one process, whose time is no rank's own",
    ),
    Rule("replicas", "pipeline", "refused", "replicas of several stages are not built in this version"),
    Rule("replicas", "disaggregation", "refused", "which has numbers of workers of its own"),
    Rule(
        "replicas", "data-parallel ranks", "refused", "the router would not know which of them has a request"
    ),
    Rule(
        "replicas",
        "measured host",
        "refused",
        "the ranks share one process, whose time is no rank's own",
    ),
    Rule(
        "data-parallel ranks",
        "pipeline",
        "refused",
        "each stage would be several ranks, which would have to agree on every microbatch",
    ),
    Rule(
        "data-parallel ranks",
        "disaggregation",
        "refused",
        "workers of several ranks would have to agree on every transfer",
    ),
    Rule(
        "shared MLP",
        "speculation",
        "refused",
        "the layers of the draft would have to be shared too, which this version does not do",
    ),
    Rule("shared MLP", "graphs", "refused", "what waits for other ranks is not captured in this version"),
    Rule(
        "data-parallel ranks",
        "measured host",
        "refused",
        "the ranks share one process, whose time is no rank's own",
    ),
    Rule("values none", "grammar", "refused", "tokens are hashes there, a grammar cannot choose them"),
    Rule("values none", "logprobs", "refused", "there are no logits"),
    Rule(
        "values none",
        "minimum length",
        "refused",
        "tokens are hashes there, an early end cannot be held back",
    ),
)


def findings(
    scenario: Scenario,
    rules: tuple[Rule, ...] = RULES,
    *,
    broken: Collection[KeyPath] = (),
    overridden: Collection[KeyPath] = (),
) -> Iterator[Finding]:
    """The refused combinations of a scenario, each with a key and the reason. The key is that of the mode that an
    ``overridden`` key switched on, if any. Modes whose keys are ``broken`` are skipped."""
    for rule in _broken(scenario, rules):
        first, second = MODES[rule.first].key, MODES[rule.second].key
        if not among(first, broken) and not among(second, broken):
            late = among(second, overridden) and not among(first, overridden)
            yield second if late else first, _refusal(rule)


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
    return scenario.engine.pipeline.stages > 1


def routed(scenario: Scenario) -> bool:
    """Whether the workers are behind a router."""
    return scenario.engine.disaggregation.mode != "none" or scenario.engine.replicas > 1


def _broken(scenario: Scenario, rules: tuple[Rule, ...]) -> Iterator[Rule]:
    latest = all(relay.state == "latest" for relay in scenario.relays)
    for rule in rules:
        refused = rule.verdict == "refused" or (rule.verdict == "latest" and not latest)
        if refused and _on(scenario, rule.first, rule.second):
            yield rule


def among(key: KeyPath, paths: Collection[KeyPath]) -> bool:
    """Whether one of ``paths`` is the key, its section, or a key within it."""
    return any(key[: len(path)] == path[: len(key)] for path in paths)


def _on(scenario: Scenario, *modes: str) -> bool:
    return all(MODES[mode].on(scenario) for mode in modes)


def _refusal(rule: Rule) -> str:
    if rule.verdict == "latest":
        return f"{rule.first} with {rule.second} runs only with relay latest: {rule.reason}"
    return f"{rule.first} cannot be combined with {rule.second}: {rule.reason}"


def _speculates(scenario: Scenario, *modes: str) -> bool:
    speculative = scenario.engine.speculative
    return speculative.algorithm != "none" and (not modes or speculative.mode in modes)
