"""Constraints between keys: values that are valid each, but not together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from . import conditions, failures
from .combinations import Finding, among
from .problems import KeyPath
from .schema import AcceptanceSection, RelaySection, Scenario
from .workload_schema import LogNormal, Normal, RecordedArrivals, Uniform


def findings(scenario: Scenario, *, broken: Collection[KeyPath] = ()) -> Iterator[Finding]:
    """The violated constraints, each with a key and a reason. Constraints on keys that are ``broken`` are skipped."""
    for check, deciding in _CHECKS:
        if not any(among(key, broken) for key in deciding):
            yield from check(scenario)


def _alternatives(scenario: Scenario) -> Iterator[Finding]:
    model, engine = scenario.model, scenario.engine
    if (model.preset is None) == (model.path is None):
        yield ("model",), "expected preset or path, and not both"
    if engine.relays and engine.relay != RelaySection():
        yield ("engine", "relays"), "expected relay or relays, and not both"
    grammar, abort = scenario.workload.sampling.grammar, scenario.workload.abort
    if grammar is not None and (grammar.regex is None) == (not grammar.choice):
        yield ("workload", "sampling", "grammar"), "expected regex or choice, and not both"
    if abort is not None and (abort.fraction > 0) == bool(abort.requests):
        yield ("workload", "abort"), "expected fraction or requests, and not both"


class _Idle(NamedTuple):
    """Keys of a section of the engine, all without ``names``, that mean nothing where ``off`` holds for it."""

    section: str
    off: Callable[[Any], bool]
    wanted: str
    names: Sequence[str] = ()


_IDLE: Final = (
    _Idle(
        "speculative",
        lambda spec: spec.algorithm == "none",
        "an algorithm; engine.speculative=none drops it all",
    ),
    _Idle(
        "pipeline",
        lambda pipeline: pipeline.stages == 1,
        "several stages",
        ("async_depth", "skip_chunk_outputs", "dynamic_chunks"),
    ),
    _Idle("pipeline", lambda pipeline: not pipeline.dynamic_chunks, "dynamic_chunks", ("smooth_factor",)),
    _Idle("data_parallel", lambda parallel: parallel.ranks == 1, "several ranks"),
    _Idle("disaggregation", lambda pair: pair.mode == "none", "mode pair"),
)


def _idle(keys: _Idle, scenario: Scenario) -> Iterator[Finding]:
    section = getattr(scenario.engine, keys.section)
    default = type(section)()
    for name in keys.names or type(section).model_fields:
        if keys.off(section) and getattr(section, name) != getattr(default, name):
            yield ("engine", keys.section, name), f"means something only with {keys.wanted}"


def _workload(scenario: Scenario) -> Iterator[Finding]:
    workload = scenario.workload
    if workload.trace is not None:
        if workload.format is None:
            yield ("workload", "format"), "required with a trace"
        for key in ("prompt_tokens", "output_tokens", "shared_prefix"):
            if getattr(workload, key) is not None:
                yield ("workload", key), "cannot be combined with a trace, which has its own"
        return
    for key in ("requests", "prompt_tokens", "output_tokens"):
        if getattr(workload, key) is None:
            yield ("workload", key), "required without a trace"
    if workload.format is not None:
        yield ("workload", "format"), "means something only with a trace"
    if isinstance(workload.arrival, RecordedArrivals):
        yield ("workload", "arrival", "process"), "means something only with a trace"


def _lengths(scenario: Scenario) -> Iterator[Finding]:
    for key in ("prompt_tokens", "output_tokens", "encoder_tokens"):
        length = getattr(scenario.workload, key)
        if isinstance(length, Uniform | Normal | LogNormal) and length.min > (length.max or length.min):
            yield ("workload", key, "min"), f"expected at most max, {length.max}, got {length.min}"


def _speculative(scenario: Scenario) -> Iterator[Finding]:
    spec, key = scenario.engine.speculative, ("engine", "speculative")
    if spec.algorithm == "none":
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
_PAGE: Final = ("engine", "page_size")
_RANKS: Final = tuple(
    ("engine", name) for name in ("pipeline", "data_parallel", "disaggregation", "replicas")
)

# Each check with the keys that it depends on. A broken key in such a section skips the check.
_CHECKS: Final[tuple[tuple[Callable[[Scenario], Iterator[Finding]], tuple[KeyPath, ...]], ...]] = (
    (_alternatives, ()),
    (_lengths, ()),
    (_speculative, (("engine", "speculative"),)),
    *((partial(_idle, keys), (("engine", keys.section),)) for keys in _IDLE),
    (_encoder, (_CHUNK,)),
    (_blocks, (("engine", "block_diffusion"), _PAGE)),
    (_controls, ()),
    (_split_prefill, (("engine", "split_prefill"), _CHUNK)),
    (conditions.findings, ()),
    (failures.findings, _RANKS),
    (_workload, (("workload", "trace"),)),
)
