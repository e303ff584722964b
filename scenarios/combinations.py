"""The combinations of modes that are refused, or that need a remark.

A pair of modes that is not in the table runs, with equal tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import reduce
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


class Rule(NamedTuple):
    """``runs``: runs, with a remark."""

    first: str
    second: str
    reason: str
    verdict: Literal["refused", "runs"] = "refused"


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

_ONE_SCHEDULER = "this version sends them to one scheduler, and there are several"
_ONE_PROCESS = "the ranks share one process, whose time is no rank's own"

_NOT_IN_MLX = "upstream's MLX loop does not have it"
_NOT_SPLIT = "its forwards cannot be run in parts of a few layers in this version"
_NOTHING_DECODES = "a request ends with its prompt, and nothing decodes"
_UNSCORED = "its forwards give log probabilities of sampled tokens only in this version"
_UNCAPTURED = "its forwards do not return them to requests in this version"
_NO_TOKEN = "no token is sampled"

RULES: tuple[Rule, ...] = (
    Rule("mixed chunk", "unchunked prefill", "there is no chunk to mix decodes into"),
    Rule("mixed chunk", "speculation", "upstream's verify steps cannot be mixed with a chunk"),
    Rule("overlap", "speculation v1", "the v1 worker runs in the serial loop"),
    Rule("draft trees", "speculation v2", "upstream's v2 accepts chains only: topk 1"),
    Rule(
        "draft trees",
        "pages",
        "accepted branches would have to be moved within their pages, which this version does not do",
    ),
    Rule("speculation v2", "grammar", "batches with a grammar are not overlapped", "runs"),
    Rule("hisparse", "radix cache", "hot buffers belong to one request, prefixes to many"),
    Rule("hisparse", "mixed chunk", "decodes mixed into a chunk would not run on"),
    Rule(
        "hisparse",
        "speculation",
        "a hot buffer has one place for the newest token, a verify step has several",
    ),
    Rule("overlap", "pipeline", "each stage runs the serial loop, stages overlap one another"),
    Rule("pipeline", "speculation", "upstream has no known working form"),
    Rule("pipeline", "hisparse", "upstream's pipeline loop does not stage prompts"),
    Rule("dynamic chunks", "unchunked prefill", "there is no chunk whose size could follow"),
    Rule("pipeline", "measured host", _ONE_PROCESS),
    Rule("disaggregation", "pipeline", "workers of several stages would have to agree on every transfer"),
    Rule("fake transfer", "speculation", "a draft would start from nothing"),
    Rule(
        "disaggregation", "hisparse", "KV is on the host where requests decode, not where prompts are", "runs"
    ),
    Rule("disaggregation", "mixed chunk", "prefill workers have no decodes to mix in", "runs"),
    Rule("disaggregation", "radix cache", "the cache is the prefill workers'", "runs"),
    Rule("disaggregation", "measured host", "the workers share one process, whose time is no rank's own"),
    Rule("replicas", "pipeline", "replicas of several stages are not built in this version"),
    Rule("replicas", "disaggregation", "which has numbers of workers of its own"),
    Rule("replicas", "data-parallel ranks", "the router would not know which of them has a request"),
    Rule("replicas", "measured host", _ONE_PROCESS),
    Rule(
        "data-parallel ranks",
        "pipeline",
        "each stage would be several ranks, which would have to agree on every microbatch",
    ),
    Rule(
        "data-parallel ranks",
        "disaggregation",
        "workers of several ranks would have to agree on every transfer",
    ),
    Rule(
        "shared MLP",
        "speculation",
        "the layers of the draft would have to be shared too, which this version does not do",
    ),
    Rule("shared MLP", "graphs", "what waits for other ranks is not captured in this version"),
    Rule("data-parallel ranks", "measured host", _ONE_PROCESS),
    Rule(
        "encoder-decoder",
        "mixed chunk",
        "prompts are not chunked: the encoder's tokens are computed as a whole",
    ),
    Rule("split prefill", "overlap", "it is a loop of its own, in which every decode is settled at once"),
    Rule("split prefill", "mixed chunk", "whole prompts run beside decodes, not chunks with them"),
    Rule("split prefill", "speculation", _NOT_SPLIT),
    Rule("split prefill", "graphs", "none is captured for a share of the GPU", "runs"),
    Rule("split prefill", "hisparse", _NOT_SPLIT),
    Rule("split prefill", "pipeline", _NOT_SPLIT),
    Rule("split prefill", "disaggregation", _NOT_SPLIT),
    Rule("split prefill", "data-parallel ranks", _NOT_SPLIT),
    Rule("split prefill", "replicas", _NOT_SPLIT),
    Rule("split prefill", "encoder-decoder", _NOT_SPLIT),
    Rule("split prefill", "embedding", _NOTHING_DECODES),
    Rule("split prefill", "block diffusion", _NOT_SPLIT),
    Rule("split prefill", "deferred", "each is a loop of its own"),
    Rule(
        "split prefill", "controls", "a prompt may be between two parts, which this version does not handle"
    ),
    Rule("deferred", "overlap", "it is a loop of its own, on one stream"),
    Rule("deferred", "speculation", _NOT_IN_MLX),
    Rule("deferred", "hisparse", _NOT_IN_MLX),
    Rule("deferred", "pipeline", _NOT_IN_MLX),
    Rule("deferred", "disaggregation", _NOT_IN_MLX),
    Rule("deferred", "data-parallel ranks", _NOT_IN_MLX),
    Rule("deferred", "embedding", _NOT_IN_MLX),
    Rule("deferred", "block diffusion", _NOT_IN_MLX),
    Rule("deferred", "grammar", "a result is read before the next launch, as in the serial loop", "runs"),
    Rule("encoder-decoder", "radix cache", "a cached prefix could end among the encoder's tokens"),
    Rule("encoder-decoder", "speculation", "a draft has no encoder in this version"),
    Rule("encoder-decoder", "hisparse", "the model attends to all tokens"),
    Rule("encoder-decoder", "pipeline", "stages have no message for the encoder's tokens in this version"),
    Rule(
        "encoder-decoder", "disaggregation", "no message has the length of the encoder's part in this version"
    ),
    Rule("encoder-decoder", "shared MLP", "its model does not share its MLP in this version"),
    Rule("encoder-decoder", "embedding", "its model has no embedding of a prompt"),
    Rule("block diffusion", "overlap", "a block's tokens are read before the next block is planned"),
    Rule("block diffusion", "mixed chunk", "requests do not decode token by token"),
    Rule("block diffusion", "radix cache", "the KV of a token depends on those behind it in its block"),
    Rule("block diffusion", "speculation", "a step gives a block of tokens as it is"),
    Rule("block diffusion", "hisparse", "KV is moved to the host token by token"),
    Rule("block diffusion", "pipeline", "a block's passes would go through all stages again and again"),
    Rule("block diffusion", "disaggregation", "there is no decode that another worker could do"),
    Rule("block diffusion", "data-parallel ranks", "the ranks would have to agree on every pass"),
    Rule("block diffusion", "replicas", "the scheduler of a replica is another one in this version"),
    Rule("block diffusion", "encoder-decoder", "its model computes no blocks"),
    Rule("block diffusion", "embedding", "a request has one of the two results"),
    Rule("block diffusion", "grammar", "tokens are not found in their order"),
    Rule("block diffusion", "logprobs", "a token has one from every pass"),
    Rule("block diffusion", "minimum length", "tokens are not found in their order"),
    Rule("block diffusion", "graphs", "graphs are of decodes: none is captured", "runs"),
    Rule("embedding", "mixed chunk", _NOTHING_DECODES),
    Rule("embedding", "speculation", _NOTHING_DECODES),
    Rule("embedding", "graphs", "graphs are of decodes: none is captured", "runs"),
    Rule("embedding", "hisparse", "KV is moved to the host for decodes, and there are none"),
    Rule("embedding", "pipeline", "stages send on tokens, and this version has no message for embeddings"),
    Rule("embedding", "disaggregation", "there is no decode that another worker could do"),
    Rule(
        "embedding", "data-parallel ranks", "idle ranks have no embedding, which this version does not handle"
    ),
    Rule("embedding", "grammar", _NO_TOKEN),
    Rule("embedding", "logprobs", _NO_TOKEN),
    Rule("embedding", "minimum length", _NO_TOKEN),
    Rule(
        "controls", "block diffusion", "its requests stay staged, where this version's controls do not reach"
    ),
    Rule("controls", "pipeline", _ONE_SCHEDULER),
    Rule("controls", "disaggregation", _ONE_SCHEDULER),
    Rule("controls", "replicas", _ONE_SCHEDULER),
    Rule("controls", "data-parallel ranks", _ONE_SCHEDULER),
    Rule("values none", "grammar", "tokens are hashes there, a grammar cannot choose them"),
    Rule("mixed chunk", "logprobs", "batches with logprobs are not mixed", "runs"),
    Rule("mixed chunk", "prompt logprobs", "batches with logprobs are not mixed", "runs"),
    Rule(
        "radix cache", "prompt logprobs", "the prompt's own tokens are computed, whatever is cached", "runs"
    ),
    Rule("speculation", "prompt logprobs", _UNSCORED),
    Rule("pipeline", "prompt logprobs", _UNSCORED),
    Rule("disaggregation", "prompt logprobs", _UNSCORED),
    Rule("encoder-decoder", "prompt logprobs", _UNSCORED),
    Rule("block diffusion", "prompt logprobs", _UNSCORED),
    Rule("embedding", "prompt logprobs", _NO_TOKEN),
    Rule("split prefill", "prompt logprobs", _UNSCORED),
    Rule("values none", "logprobs", "there are no logits"),
    Rule("values none", "prompt logprobs", "there are no logits"),
    Rule("radix cache", "hidden states", "those of cached tokens are not returned", "runs"),
    Rule("graphs", "hidden states", "batches that return them are not replayed", "runs"),
    Rule("speculation", "hidden states", _UNCAPTURED),
    Rule("pipeline", "hidden states", _UNCAPTURED),
    Rule("disaggregation", "hidden states", _UNCAPTURED),
    Rule("data-parallel ranks", "hidden states", _UNCAPTURED),
    Rule("encoder-decoder", "hidden states", _UNCAPTURED),
    Rule("block diffusion", "hidden states", _UNCAPTURED),
    Rule("embedding", "hidden states", "a request's result is one already"),
    Rule("split prefill", "hidden states", _UNCAPTURED),
    Rule("values none", "hidden states", "there are none"),
    Rule("values none", "minimum length", "tokens are hashes there, an early end cannot be held back"),
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
    for rule in rules:
        if rule.verdict != "refused" or not _on(scenario, rule.first, rule.second):
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
