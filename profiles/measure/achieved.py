"""Memory traffic and arithmetic of forwards, summed from the costs that their kernels declare, and the rates at which
the device did them.

Holds for a decoder with dense attention on one device. The padding of graphs, sampling and the relay's kernels are left
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ...sched.batch import ForwardBatch, ForwardMode
from ...sched.kernels.declare import kernels
from ...sched.memory.pools import KVPool
from ...sched.model.config import ModelConfig
from ...sched.model.decoder import Decoder
from ...sched.model.weights import empty_weights
from ..platform.hardware import HardwareProfile
from ..record.result import Abstained
from .distribution import Distribution
from .metrics import Metrics, computes, plain
from .requests import RequestRecord

_META: Final = torch.device("meta")
_DECODE_METRICS: Final = ("decode_batch_size", "decode_bandwidth", "decode_flops", "decode_roofline_ms")
_PROMPT_METRIC: Final = "prefill_flops"


class Load(NamedTuple):
    """Memory traffic, and floating-point operations."""

    bytes: float
    flops: float

    def plus(self, other: Load, times: float = 1) -> Load:
        return Load(self.bytes + times * other.bytes, self.flops + times * other.flops)


class DecodeLoad(NamedTuple):
    """The load of a decode: of the step, of each of its requests, and of each position that they attend to."""

    step: Load
    request: Load
    position: Load

    def of(self, *, steps: float, requests: float, positions: float) -> Load:
        """The load of ``steps`` decodes with that many requests and positions in total."""
        return Load(0, 0).plus(self.step, steps).plus(self.request, requests).plus(self.position, positions)


@cache
def decode_load(model: ModelConfig) -> DecodeLoad:
    """Every declared cost is linear in requests and positions, so that three batches determine it."""
    decoder = _decoder(model)
    one, two, longer = (_load(decoder, lengths) for lengths in ((1,), (1, 1), (2,)))
    position = longer.plus(one, -1)
    request = two.plus(one, -1).plus(position, -1)
    return DecodeLoad(one.plus(request, -1).plus(position, -1), request, position)


class PromptLoad(NamedTuple):
    """Operations for each token of a prompt, each pair of a token and a position that it sees, and each request."""

    token: float
    pair: float
    request: float

    def of(self, *, tokens: float, pairs: float, requests: float) -> float:
        return self.token * tokens + self.pair * pairs + self.request * requests


@cache
def prompt_load(model: ModelConfig) -> PromptLoad:
    """A prompt of n tokens has n(n + 1)/2 pairs, so that three prompts determine the costs."""
    decoder = _decoder(model)
    one, two, three = (_load(decoder, (n,), prompts=True).flops for n in (1, 2, 3))
    pair = three - 2 * two + one
    token = two - one - 2 * pair
    return PromptLoad(token, pair, one - token - pair)


def _decoder(model: ModelConfig) -> Decoder:
    """On the meta device, without storage."""
    kv = KVPool(
        num_layers=model.num_layers,
        tokens=1,
        page_size=1,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
        device=_META,
    )
    pages = torch.empty((1, 1), dtype=torch.int32, device=_META)
    return Decoder(model, empty_weights(model, device=_META), kv=kv, req_to_token=pages)


def _load(decoder: Decoder, lengths: tuple[int, ...], *, prompts: bool = False) -> Load:
    """One decode of requests of these lengths, or one forward of all their tokens."""
    lens, tokens = torch.tensor(lengths, dtype=torch.int64), sum(lengths) if prompts else len(lengths)
    ids, rows = (torch.zeros(n, dtype=torch.int64, device=_META) for n in (tokens, len(lengths)))
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND if prompts else ForwardMode.DECODE,
        batch_size=len(lengths),
        num_tokens=tokens,
        input_ids=ids,
        positions=ids,
        req_pool_indices=rows,
        seq_lens=lens,
        out_cache_loc=ids,
        max_seq_len=max(lengths),
        extend_lens=lens.to(torch.int32) if prompts else None,
        max_extend_len=max(lengths) if prompts else 1,
    )
    counter = _CostCounter()
    with counter:
        decoder.forward(batch)
    return counter.load


class _CostCounter(TorchFunctionMode):
    """Sums the declared costs of kernels instead of running them. TorchDispatchMode would import torch's compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.load = Load(0, 0)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # fmt: skip
        kernel = kernels().get(func)
        if kernel is None:
            return func(*args, **(kwargs or {}))
        if kernel.cost is not None:
            work = kernel.cost(*args)
            self.load = self.load.plus(Load(work.bytes, work.flops))
        return kernel.meta(*args)


@computes(*_DECODE_METRICS)
def decode_metrics(
    load: DecodeLoad,
    hardware: HardwareProfile,
    records: Iterable[RequestRecord],
    *,
    spans: Distribution,
    requests: int,
    exact: bool,
) -> Metrics:
    """``spans`` are those of decodes; ``requests`` is the sum of their batch sizes."""
    context, steps = _context(records), len(spans)
    ns = spans.mean * steps if steps else 0
    if not (context and requests and ns):
        return {name: Abstained(abstained="no decode ran") for name in _DECODE_METRICS}
    total = load.of(steps=steps, requests=requests, positions=context * requests)
    peak = hardware.kernels.memory_bandwidth.value * hardware.kernels.efficiency.memory.value
    rates = (total.bytes / ns, total.flops / ns / 1e3)
    values = (requests / steps, *rates, 1e3 * total.bytes / peak / steps)
    return {
        name: plain(name, value, exact=exact) for name, value in zip(_DECODE_METRICS, values, strict=True)
    }


def _context(records: Iterable[RequestRecord]) -> float:
    """Mean number of positions that a decoded token attends to, its own included. The first token of an output belongs
    to the prompt. 0 where no token was decoded."""
    decoded = positions = 0
    for record in records:
        tokens = max(record.output_tokens - 1, 0)
        decoded += tokens
        positions += tokens * record.prompt_tokens + tokens * (tokens + 1) // 2
    return positions / decoded if decoded else 0.0


@computes(_PROMPT_METRIC)
def prompt_metrics(
    load: PromptLoad, records: Sequence[RequestRecord], *, spans: Distribution, why_not: str, exact: bool
) -> Metrics:
    """``spans`` are those of prefills. ``why_not`` is the reason for which their work is not known, or empty."""
    ns = spans.mean * len(spans) if len(spans) else 0
    reached = [record for record in records if record.first_token is not None]
    why = why_not or ("" if ns and len(reached) == len(records) else "not every prompt was computed")
    if why:
        return {_PROMPT_METRIC: Abstained(abstained=why)}
    tokens = sum(record.prompt_tokens - record.cached_tokens for record in records)
    pairs = sum(_pairs(record.prompt_tokens) - _pairs(record.cached_tokens) for record in records)
    flops = load.of(tokens=tokens, pairs=pairs, requests=len(records))
    return {_PROMPT_METRIC: plain(_PROMPT_METRIC, flops / ns / 1e3, exact=exact)}


def _pairs(tokens: int) -> int:
    """Pairs of a token and a position up to its own, among so many tokens."""
    return tokens * (tokens + 1) // 2
