"""The lengths and sampling of all requests before any prompt is built: drawn, or those of a trace."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .distributions import Counts, Summary, draw, requested
from .prompts import RandomStream, blocks, packed, stream, text
from .records import TraceError, TraceRecord
from .text_tokens import TokenCount
from .traces import read
from .workload_schema import Sampling, WorkloadSection

Prompt = Callable[[int, int], "array[int]"]
"""(index of the request, length) to its token ids."""


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


def drawn(workload: WorkloadSection, *, vocab_size: int, seed: int) -> Script:
    """Lengths from the distributions and random tokens, after a shared prefix where the workload has one."""
    assert workload.requests and workload.prompt_tokens and workload.output_tokens
    size, shared = workload.requests, workload.shared_prefix
    prefix = shared.tokens if shared else 0
    own = draw(workload.prompt_tokens, size, rng=stream(seed, RandomStream.PROMPT_TOKENS))
    return Script(
        prompt_tokens=own + prefix,
        output_tokens=draw(workload.output_tokens, size, rng=stream(seed, RandomStream.OUTPUT_TOKENS)),
        prompt=_random(workload, vocab_size=vocab_size, seed=seed),
        sampling=lambda _: workload.sampling,
        requested=(requested(workload.prompt_tokens).plus(prefix), requested(workload.output_tokens)),
    )


def _random(workload: WorkloadSection, *, vocab_size: int, seed: int) -> Prompt:
    shared = workload.shared_prefix

    def own(index: int, length: int) -> Counts:
        return text(seed, RandomStream.PROMPT, key=index, length=length, vocab_size=vocab_size)

    if shared is None:
        return lambda index, length: packed(own(index, length))
    groups = stream(seed, RandomStream.GROUP).integers(shared.groups, size=workload.requests)

    def behind_prefix(index: int, length: int) -> array[int]:
        group = int(groups[index])
        prefix = text(seed, RandomStream.PREFIX, key=group, length=shared.tokens, vocab_size=vocab_size)
        return packed(np.concatenate((prefix, own(index, max(0, length - shared.tokens))))[:length])

    return behind_prefix


def replay(
    workload: WorkloadSection, path: Path, *, tokens: TokenCount, vocab_size: int, seed: int
) -> Script:
    """The first ``requests`` of the trace, in order of their instants. ``tokens`` counts those of a text. Raises
    TraceError."""
    assert workload.format
    records, left_out = read(path, workload.format, limit=workload.requests, tokens=tokens)
    _refuse_unusable(records, path, vocab_size=vocab_size)
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


def _refuse_unusable(records: Sequence[TraceRecord], path: Path, *, vocab_size: int) -> None:
    if not records:
        raise TraceError(str(path), 1, "expected at least one request, got none")
    for record in records:
        highest = max(record.prompt_ids or (0,))
        if highest >= vocab_size:
            message = f"prompt_token_ids: expected ids below the model's {vocab_size}, got {highest}"
            raise TraceError(str(path), record.line, message)


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
