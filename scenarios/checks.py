"""What one key says about its neighbours: values that are well formed each, but not together."""

from __future__ import annotations

from collections.abc import Iterator

from . import failures
from .combinations import Finding
from .schema import Disaggregation, Pipeline, Relay, Scenario, SimulatedAcceptance, Speculative
from .workload_schema import Abort, Distribution, Fixed, Grammar, Recorded, Workload


def findings(scenario: Scenario) -> Iterator[Finding]:
    """The key to blame, and why; nothing for a sound scenario."""
    if (scenario.model.preset is None) == (scenario.model.path is None):
        yield ("model",), "expected preset or path, and not both"
    if scenario.engine.relays and scenario.engine.relay != Relay():
        yield ("engine", "relays"), "expected relay or relays, and not both"
    yield from _length("prompt_tokens", scenario.workload.prompt_tokens)
    yield from _length("output_tokens", scenario.workload.output_tokens)
    yield from _speculative(scenario)
    if scenario.engine.pipeline.stages == 1:
        for name in ("async_depth", "skip_chunk_outputs", "dynamic_chunks"):
            if getattr(scenario.engine.pipeline, name):
                yield ("engine", "pipeline", name), "means something only with several stages"
    if not scenario.engine.pipeline.dynamic_chunks and "smooth_factor" in _changed(scenario.engine.pipeline):
        yield ("engine", "pipeline", "smooth_factor"), "means something only with dynamic_chunks"
    if scenario.engine.data_parallel.ranks == 1 and scenario.engine.data_parallel.mlp == "shared":
        yield ("engine", "data_parallel", "mlp"), "means something only with several ranks"
    pair = scenario.engine.disaggregation
    if pair.mode == "none":
        for name in _changed(pair):
            yield ("engine", "disaggregation", name), "means something only with mode pair"
    yield from _grammar(scenario.workload.sampling.grammar)
    yield from _abort(scenario.workload.abort)
    yield from failures.findings(scenario)
    yield from _drawn(scenario.workload) if scenario.workload.trace is None else _replayed(scenario.workload)


def _drawn(workload: Workload) -> Iterator[Finding]:
    for key in ("requests", "prompt_tokens", "output_tokens"):
        if getattr(workload, key) is None:
            yield ("workload", key), "required without a trace"
    if workload.format is not None:
        yield ("workload", "format"), "means something only with a trace"
    if isinstance(workload.arrival, Recorded):
        yield (
            ("workload", "arrival", "process"),
            "means something only with a trace",
        )


def _replayed(workload: Workload) -> Iterator[Finding]:
    if workload.format is None:
        yield ("workload", "format"), "required with a trace"
    for key in ("prompt_tokens", "output_tokens", "shared_prefix"):
        if getattr(workload, key) is not None:
            yield ("workload", key), "cannot be combined with a trace, which has its own"


def _length(key: str, length: Distribution | None) -> Iterator[Finding]:
    if length is None or isinstance(length, Fixed) or length.max is None:
        return
    if length.min > length.max:
        yield ("workload", key, "min"), f"expected at most max, {length.max}, got {length.min}"


def _speculative(scenario: Scenario) -> Iterator[Finding]:
    spec, key = scenario.engine.speculative, ("engine", "speculative")
    if spec.algorithm == "none":
        for name in _changed(spec):
            yield (*key, name), "means something only with an algorithm; engine.speculative=none drops it all"
        return
    tokens, chain = spec.draft_tokens, spec.steps + 1
    if spec.topk == 1 and tokens not in (None, chain):
        yield (*key, "draft_tokens"), f"a chain of {spec.steps} steps has {chain}, got {tokens}"
    most = chain if spec.topk == 1 else 1 + spec.topk + (spec.steps - 1) * spec.topk**2
    if spec.topk > 1 and tokens is not None and not 2 <= tokens <= most:
        yield (*key, "draft_tokens"), f"expected 2 to {most}, all that the tree has, got {tokens}"
    if isinstance(spec.acceptance, SimulatedAcceptance):
        if spec.acceptance.mean > chain:
            yield (
                (*key, "acceptance", "mean"),
                f"expected at most steps + 1 = {chain}, got {spec.acceptance.mean:g}",
            )
    elif scenario.device.values == "none":
        yield (*key, "acceptance"), "with values none nothing can be measured: expected {mean: ...}"


def _changed(section: Speculative | Pipeline | Disaggregation) -> list[str]:
    default = type(section)()
    return [name for name in type(section).model_fields if getattr(section, name) != getattr(default, name)]


def _grammar(grammar: Grammar | None) -> Iterator[Finding]:
    if grammar is not None and (grammar.regex is None) == (not grammar.choice):
        yield ("workload", "sampling", "grammar"), "expected regex or choice, and not both"


def _abort(abort: Abort | None) -> Iterator[Finding]:
    if abort is not None and (abort.fraction > 0) == bool(abort.requests):
        yield ("workload", "abort"), "expected fraction or requests, and not both"
