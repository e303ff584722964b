"""Constraints between keys: values that are valid each, but not together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Final

from . import conditions, failures
from .combinations import Finding, among
from .problems import KeyPath
from .schema import AcceptanceSection, Disaggregation, Pipeline, RelaySection, Scenario, Speculative
from .workload_schema import Distribution, Fixed, RecordedArrivals, WorkloadSection


def findings(scenario: Scenario, *, broken: Collection[KeyPath] = ()) -> Iterator[Finding]:
    """The violated constraints, each with a key and a reason. Constraints on keys that are ``broken`` are skipped."""
    for check, deciding in _CHECKS:
        if not any(among(key, broken) for key in deciding):
            yield from check(scenario)


def _model(scenario: Scenario) -> Iterator[Finding]:
    if (scenario.model.preset is None) == (scenario.model.path is None):
        yield ("model",), "expected preset or path, and not both"


def _relays(scenario: Scenario) -> Iterator[Finding]:
    if scenario.engine.relays and scenario.engine.relay != RelaySection():
        yield ("engine", "relays"), "expected relay or relays, and not both"


def _pipeline(scenario: Scenario) -> Iterator[Finding]:
    wanted, key = scenario.engine.pipeline, ("engine", "pipeline")
    if wanted.stages == 1:
        for name in ("async_depth", "skip_chunk_outputs", "dynamic_chunks"):
            if getattr(wanted, name):
                yield (*key, name), "means something only with several stages"
    if not wanted.dynamic_chunks and "smooth_factor" in _changed(wanted):
        yield (*key, "smooth_factor"), "means something only with dynamic_chunks"


def _data_parallel(scenario: Scenario) -> Iterator[Finding]:
    if scenario.engine.data_parallel.ranks == 1 and scenario.engine.data_parallel.mlp == "shared":
        yield ("engine", "data_parallel", "mlp"), "means something only with several ranks"


def _disaggregation(scenario: Scenario) -> Iterator[Finding]:
    pair = scenario.engine.disaggregation
    if pair.mode == "none":
        for name in _changed(pair):
            yield ("engine", "disaggregation", name), "means something only with mode pair"


def _workload(scenario: Scenario) -> Iterator[Finding]:
    workload = scenario.workload
    yield from _drawn(workload) if workload.trace is None else _replayed(workload)


def _drawn(workload: WorkloadSection) -> Iterator[Finding]:
    for key in ("requests", "prompt_tokens", "output_tokens"):
        if getattr(workload, key) is None:
            yield ("workload", key), "required without a trace"
    if workload.format is not None:
        yield ("workload", "format"), "means something only with a trace"
    if isinstance(workload.arrival, RecordedArrivals):
        yield (
            ("workload", "arrival", "process"),
            "means something only with a trace",
        )


def _replayed(workload: WorkloadSection) -> Iterator[Finding]:
    if workload.format is None:
        yield ("workload", "format"), "required with a trace"
    for key in ("prompt_tokens", "output_tokens", "shared_prefix"):
        if getattr(workload, key) is not None:
            yield ("workload", key), "cannot be combined with a trace, which has its own"


def _lengths(scenario: Scenario) -> Iterator[Finding]:
    yield from _length("prompt_tokens", scenario.workload.prompt_tokens)
    yield from _length("output_tokens", scenario.workload.output_tokens)
    yield from _length("encoder_tokens", scenario.workload.encoder_tokens)


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
    if isinstance(spec.acceptance, AcceptanceSection):
        if spec.acceptance.mean > chain:
            yield (
                (*key, "acceptance", "mean"),
                f"expected at most steps + 1 = {chain}, got {spec.acceptance.mean:g}",
            )
    elif scenario.device.values == "none":
        yield (*key, "acceptance"), "with values none acceptance cannot be measured: expected {mean: ...}"


def _changed(section: Speculative | Pipeline | Disaggregation) -> list[str]:
    default = type(section)()
    return [name for name in type(section).model_fields if getattr(section, name) != getattr(default, name)]


def _encoder(scenario: Scenario) -> Iterator[Finding]:
    if scenario.workload.encoder_tokens is not None and scenario.engine.chunked_prefill_size is not None:
        yield _CHUNK, "expected none: the encoder's tokens of a prompt are computed as a whole"


def _blocks(scenario: Scenario) -> Iterator[Finding]:
    blocks, sampling = scenario.engine.block_diffusion, scenario.workload.sampling
    if not blocks.enabled:
        return
    if blocks.block_size % scenario.engine.page_size:
        yield _PAGE, f"expected a divisor of the {blocks.block_size} tokens of a block"
    if sampling.temperature or sampling.penalised:
        yield (
            ("workload", "sampling"),
            "block diffusion takes the likeliest tokens: expected greedy, no penalty",
        )


def _grammar(scenario: Scenario) -> Iterator[Finding]:
    grammar = scenario.workload.sampling.grammar
    if grammar is not None and (grammar.regex is None) == (not grammar.choice):
        yield ("workload", "sampling", "grammar"), "expected regex or choice, and not both"


def _abort(scenario: Scenario) -> Iterator[Finding]:
    abort = scenario.workload.abort
    if abort is not None and (abort.fraction > 0) == bool(abort.requests):
        yield ("workload", "abort"), "expected fraction or requests, and not both"


def _split_prefill(scenario: Scenario) -> Iterator[Finding]:
    wanted, key = scenario.engine.split_prefill, ("engine", "split_prefill")
    if wanted.enabled and scenario.engine.chunked_prefill_size is not None:
        yield ("engine", "chunked_prefill_size"), "expected none: with engine.split_prefill prompts run whole"
    rows = [division.from_rows for division in wanted.divisions]
    if rows != sorted(set(rows)):
        yield (*key, "divisions"), "expected divisions with rising from_rows"


def _controls(scenario: Scenario) -> Iterator[Finding]:
    for place, control in enumerate(scenario.workload.controls):
        pauses = control.action.startswith("pause")
        if pauses != (control.ms is not None):
            text = f"required with {control.action}" if pauses else f"means nothing with {control.action}"
            yield ("workload", "controls", place, "ms"), text


_CHUNK: Final = ("engine", "chunked_prefill_size")
_BLOCKS: Final = ("engine", "block_diffusion")
_PAGE: Final = ("engine", "page_size")
_PIPELINE: Final = ("engine", "pipeline")
_DATA_PARALLEL: Final = ("engine", "data_parallel")
_DISAGGREGATION: Final = ("engine", "disaggregation")

# Each check with the keys that it depends on. A broken key in such a section skips the check.
_CHECKS: Final[tuple[tuple[Callable[[Scenario], Iterator[Finding]], tuple[KeyPath, ...]], ...]] = (
    (_model, ()),
    (_relays, ()),
    (_lengths, ()),
    (_speculative, (("engine", "speculative"),)),
    (_pipeline, (_PIPELINE,)),
    (_data_parallel, (_DATA_PARALLEL,)),
    (_disaggregation, (_DISAGGREGATION,)),
    (_encoder, (_CHUNK,)),
    (_blocks, (_BLOCKS, _PAGE)),
    (_grammar, ()),
    (_abort, ()),
    (_controls, ()),
    (_split_prefill, (("engine", "split_prefill"), _CHUNK)),
    (conditions.findings, ()),
    (failures.findings, (_PIPELINE, _DATA_PARALLEL, _DISAGGREGATION, ("engine", "replicas"))),
    (_workload, (("workload", "trace"),)),
)
