"""The lengths and sampling of all requests before any prompt is built: drawn here, or from a trace by ``replay``."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .distributions import Counts, Summary, draw, requested
from .prompts import RandomStream, packed, stream, text
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
