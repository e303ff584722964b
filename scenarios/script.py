"""The lengths, token ids and sampling of all requests before any prompt is built: drawn, or those of a trace.

The ids of a prompt are a hash of (seed, random stream, key, position), so that any prompt can be built alone, at any
time, and equal keys give equal tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import checks, combinations
from .fields import Summary
from .records import BLOCK, TraceError, TraceRecord
from .schema import Scenario
from .traces import TraceContent, read, token_count, tokenizer_file
from .workload_schema import Distribution, Fixed, LogNormal, Normal, Sampling, Uniform, WorkloadSection

Counts = NDArray[np.int64]
Prompt = Callable[[int, int], "array[int]"]
"""(index of the request, length) to its token ids."""

_Z95 = 1.6448536269514722  # the standard normal's 95th percentile
_WEYL = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = [np.array(shift, dtype=np.uint64) for shift in (30, 27, 31)]
_FACTORS = [np.array(factor, dtype=np.uint64) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]


def summarise(counts: Counts) -> Summary:
    p50, p95 = np.percentile(counts, [50, 95])
    return Summary(float(counts.mean()), float(p50), float(p95))


def draw(dist: Distribution, size: int, *, rng: np.random.Generator) -> Counts:
    """``size`` token counts, [size] int64."""
    match dist:
        case Fixed():
            return np.full(size, dist.value, dtype=np.int64)
        case Uniform():
            return rng.integers(dist.min, dist.max, size=size, endpoint=True)
        case Normal():
            return _cut(rng.normal(dist.mean, dist.std, size), dist)
        case LogNormal():
            mu, sigma = _log_parameters(dist)
            return _cut(rng.lognormal(mu, sigma, size), dist)


def requested(dist: Distribution) -> Summary:
    """The summary of the distribution without its min and max."""
    match dist:
        case Fixed():
            return Summary(dist.value, dist.value, dist.value)
        case Uniform():
            width = dist.max - dist.min
            return Summary(dist.min + width / 2, dist.min + width / 2, dist.min + width * 0.95)
        case Normal():
            return Summary(dist.mean, dist.mean, dist.mean + _Z95 * dist.std)
        case LogNormal():
            mu, sigma = _log_parameters(dist)
            return Summary(dist.mean, math.exp(mu), math.exp(mu + _Z95 * sigma))


def _log_parameters(dist: LogNormal) -> tuple[float, float]:
    variance = math.log1p((dist.std / dist.mean) ** 2)
    return math.log(dist.mean) - variance / 2, math.sqrt(variance)


def _cut(values: NDArray[np.float64], dist: Normal | LogNormal) -> Counts:
    return np.rint(np.clip(values, dist.min, dist.max or 2**24)).astype(np.int64)


class RandomStream(IntEnum):
    """The independent streams of random numbers of a workload, by their use."""

    PROMPT_TOKENS = 0
    OUTPUT_TOKENS = 1
    ARRIVAL = 2
    GROUP = 3
    ABORT = 4
    PROMPT = 5
    PREFIX = 6
    BLOCK = 7
    ENCODER = 8
    ENCODER_TOKENS = 9


def stream(seed: int, purpose: RandomStream) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose,)))


def text(seed: int, purpose: RandomStream, *, key: int, length: int, vocab_size: int) -> Counts:
    """The ``length`` token ids of one text, [length] int64 in [0, vocab_size)."""
    tokens: Counts = _tokens(_keys(seed, purpose, ids=[key]), length=length, vocab_size=vocab_size)[0]
    return tokens


def blocks(seed: int, hash_ids: Sequence[int], *, length: int, vocab_size: int) -> Counts:
    """A prompt of ``length`` tokens made of Mooncake's blocks; the last one is cut. [length] int64."""
    keys = _keys(seed, RandomStream.BLOCK, ids=hash_ids)
    tokens: Counts = _tokens(keys, length=BLOCK, vocab_size=vocab_size).reshape(-1)
    return tokens[:length]


def packed(tokens: Counts) -> array[int]:
    """As the array('q') that a Request holds."""
    return array("q", tokens.astype(np.int64, copy=False).tobytes())


def _keys(seed: int, purpose: RandomStream, *, ids: Sequence[int]) -> NDArray[np.uint64]:
    return _mixed(_stream_key(seed, purpose) + np.array(ids, dtype=np.uint64))


@cache
def _stream_key(seed: int, purpose: RandomStream) -> NDArray[np.uint64]:
    """[1]."""
    return _mixed(_mixed(np.array([seed], dtype=np.uint64)) + np.uint64(purpose))


@lru_cache(maxsize=64)
def _positions(length: int) -> NDArray[np.uint64]:
    return np.arange(1, length + 1, dtype=np.uint64) * _WEYL


def _tokens(keys: NDArray[np.uint64], *, length: int, vocab_size: int) -> Counts:
    ids = _mixed(keys[:, None] + _positions(length)) % np.uint64(vocab_size)
    return ids.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), elementwise."""
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])


@dataclass(frozen=True, slots=True)
class Script:
    """One row per request, [n] each. ``instants`` are those of a trace, None where it has none."""

    prompt_tokens: Counts
    output_tokens: Counts
    prompt: Prompt
    sampling: Callable[[int], Sampling]
    instants: Counts | None = None
    requested: tuple[Summary, Summary] | None = None  # of prompts and outputs, where they were drawn
    left_out: int = 0  # records of a trace without prompt or output

    def __len__(self) -> int:
        return len(self.prompt_tokens)


def script_of(scenario: Scenario, *, vocab_size: int, seed: int) -> Script:
    """Raises TraceError."""
    if scenario.workload.trace is None:
        return _drawn(scenario.workload, vocab_size=vocab_size, seed=seed)
    return _replay(scenario, vocab_size=vocab_size, seed=seed)


def _drawn(workload: WorkloadSection, *, vocab_size: int, seed: int) -> Script:
    """Lengths from the distributions and random tokens, after a shared prefix where the workload has one."""
    assert workload.requests and workload.prompt_tokens and workload.output_tokens
    size, shared = workload.requests, workload.shared_prefix
    prefix = shared.tokens if shared else 0
    own = draw(workload.prompt_tokens, size, rng=stream(seed, RandomStream.PROMPT_TOKENS))
    prompts = Summary(*(figure + prefix for figure in astuple(requested(workload.prompt_tokens))))
    return Script(
        prompt_tokens=own + prefix,
        output_tokens=draw(workload.output_tokens, size, rng=stream(seed, RandomStream.OUTPUT_TOKENS)),
        prompt=_random(workload, vocab_size=vocab_size, seed=seed),
        sampling=lambda _: workload.sampling,
        requested=(prompts, requested(workload.output_tokens)),
    )


def _random(workload: WorkloadSection, *, vocab_size: int, seed: int) -> Prompt:
    assert workload.requests
    shared, keys = workload.shared_prefix, _keys(seed, RandomStream.PROMPT, ids=range(workload.requests))

    def own(index: int, length: int) -> Counts:
        tokens: Counts = _tokens(keys[index : index + 1], length=length, vocab_size=vocab_size)[0]
        return tokens

    if shared is None:
        return lambda index, length: packed(own(index, length))
    groups = stream(seed, RandomStream.GROUP).integers(shared.groups, size=workload.requests)

    def behind_prefix(index: int, length: int) -> array[int]:
        group = int(groups[index])
        prefix = text(seed, RandomStream.PREFIX, key=group, length=shared.tokens, vocab_size=vocab_size)
        return packed(np.concatenate((prefix, own(index, max(0, length - shared.tokens))))[:length])

    return behind_prefix


def _replay(scenario: Scenario, *, vocab_size: int, seed: int) -> Script:
    """The first ``requests`` of the trace, in order of their instants."""
    workload, path = scenario.workload, scenario.file("workload", "trace")
    assert path is not None
    records, left_out = _records(scenario, path)
    _refuse_unusable(records, scenario, path, vocab_size=vocab_size)
    instants = _instants(records)
    if instants is not None:
        order = np.argsort(instants, kind="stable")
        records, instants = [records[place] for place in order], instants[order]
    return Script(
        prompt_tokens=np.array([record.prompt_tokens for record in records], dtype=np.int64),
        output_tokens=np.array([record.output_tokens for record in records], dtype=np.int64),
        prompt=_prompts(records, vocab_size=vocab_size, seed=seed),
        sampling=lambda index: _overlaid(workload.sampling, records[index].sampling),
        instants=instants,
        left_out=left_out,
    )


def _records(scenario: Scenario, path: Path) -> TraceContent:
    workload, tokens = scenario.workload, token_count(tokenizer_file(scenario))
    assert workload.format
    return read(path, workload.format, limit=workload.requests, tokens=tokens)


def samplings(scenario: Scenario) -> Collection[Sampling]:
    """The different ones of the scenario's requests. Raises TraceError."""
    base, path = scenario.workload.sampling, scenario.file("workload", "trace")
    if path is None or scenario.workload.format != "jsonl":
        return {base}
    return {_overlaid(base, record.sampling) for record in _records(scenario, path).records}


def _refuse_unusable(
    records: Sequence[TraceRecord], scenario: Scenario, path: Path, *, vocab_size: int
) -> None:
    if not records:
        raise TraceError(str(path), 1, "expected at least one request, got none")
    base = scenario.workload.sampling
    possible = {base}
    for record in records:
        highest = max(record.prompt_ids or (0,))
        if highest >= vocab_size:
            message = f"prompt_token_ids: expected ids below the model's {vocab_size}, got {highest}"
            raise TraceError(str(path), record.line, message)
        sampling = _overlaid(base, record.sampling)
        if sampling not in possible:
            workload = scenario.workload.model_copy(update={"sampling": sampling})
            asked = scenario.model_copy(update={"workload": workload})
            found = *checks.findings(asked), *combinations.findings(asked)
            for _, reason in found or _malformed(sampling, vocab_size):
                raise TraceError(str(path), record.line, f"sampling: {reason}")
            possible.add(sampling)


def _malformed(sampling: Sampling, vocab_size: int) -> Iterator[combinations.Finding]:
    """A pattern that does not compile, whichever token ends a sequence. No pattern needs more tokens than the bytes."""
    from ..sched.model.grammar import GrammarCache, GrammarError

    try:
        if sampling.grammar is not None:
            GrammarCache(min(vocab_size, 257), (0,)).start(sampling.grammar.spec)
    except GrammarError as error:
        yield ("workload", "sampling", "grammar"), str(error)


def _instants(records: Sequence[TraceRecord]) -> Counts | None:
    """[n] ns from the first arrival; None unless every record has its own."""
    instants = [record.arrival for record in records if record.arrival is not None]
    if len(instants) < len(records):
        return None
    first = min(instants)
    return np.array([instant - first for instant in instants], dtype=np.int64)


def _prompts(records: Sequence[TraceRecord], *, vocab_size: int, seed: int) -> Prompt:
    def prompt(index: int, length: int) -> array[int]:
        record = records[index]
        if record.prompt_ids is not None:
            return record.prompt_ids[:length]
        if record.hash_ids:
            return packed(blocks(seed, record.hash_ids, length=length, vocab_size=vocab_size))
        return packed(text(seed, RandomStream.PROMPT, key=index, length=length, vocab_size=vocab_size))

    return prompt


def _overlaid(base: Sampling, own: Sampling | None) -> Sampling:
    """The sampling of the workload, overridden by that of the record."""
    if own is None:
        return base
    return base.model_copy(update={key: getattr(own, key) for key in own.model_fields_set})
