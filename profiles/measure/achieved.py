"""Memory traffic and arithmetic of forwards, summed from the costs that their kernels declare, and the rates at which
the device did them.

Holds for a decoder with dense attention on one device. The padding of graphs, sampling and the relay's kernels are left
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
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
from .metrics import Metrics, plain
from .requests import RequestRecord

_META: Final = torch.device("meta")
_BATCH_SIZE: Final = "decode_batch_size"
_DECODE_RATES: Final = ("decode_bandwidth", "decode_flops", "decode_roofline_ms")
_PROMPT_METRIC: Final = "prefill_flops"


Load = NDArray[np.object_]
"""[2]: bytes of memory traffic, and floating-point operations, as numbers of Python, of which whole ones are exact."""
UnitLoads = Mapping[str, Load]
"""The load of one unit of each amount."""


def total(per_unit: UnitLoads, **amounts: float) -> Load:
    """The load of these amounts, in each of which it is linear."""
    return sum((amount * per_unit[name] for name, amount in amounts.items()), np.zeros(2, object))


@cache
def decode_load(model: ModelConfig) -> UnitLoads:
    """The load of a decode for each of ``steps``, of their ``requests``, and of the ``positions`` that these attend to.
    Every declared cost is linear in requests and positions, so that three batches determine it."""
    decoder = _decoder(model)
    one, two, longer = (_load(decoder, lengths) for lengths in ((1,), (1, 1), (2,)))
    position = longer - one
    request = two - one - position
    return {"steps": one - request - position, "requests": request, "positions": position}


@cache
def prompt_load(model: ModelConfig) -> UnitLoads:
    """The load of prompts for each of their ``tokens``, of the ``pairs`` of a token and a position that it sees, and of
    the ``requests``; only its operations are linear in these. A prompt of n tokens has n(n + 1)/2 pairs, so that three
    prompts determine the costs."""
    decoder = _decoder(model)
    one, two, three = (_load(decoder, (n,), prompts=True) for n in (1, 2, 3))
    pair = three - 2 * two + one
    token = two - one - 2 * pair
    return {"tokens": token, "pairs": pair, "requests": one - token - pair}


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
        self.load: Load = np.zeros(2, object)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # fmt: skip
        kernel = kernels().get(func)
        if kernel is None:
            return func(*args, **(kwargs or {}))
        if kernel.cost is not None:
            work = kernel.cost(*args)
            self.load += (work.bytes, work.flops)
        return kernel.meta(*args)


def decode_metrics(
    load: UnitLoads,
    hardware: HardwareProfile,
    records: Iterable[RequestRecord],
    *,
    spans: Distribution,
    requests: int,
) -> Metrics:
    """``spans`` are those of decodes; ``requests`` is the sum of their batch sizes. The load needs the context of the
    tokens that requests got from decodes, the batch size does not."""
    context, steps = _context(records), len(spans)
    ns = spans.mean * steps if steps else 0
    if not (requests and ns):
        return {name: Abstained(abstained="no decode ran") for name in (_BATCH_SIZE, *_DECODE_RATES)}
    size = plain(_BATCH_SIZE, requests / steps)
    if not context:
        why = "no token of a decode was used, so that their contexts are not known"
        return {_BATCH_SIZE: size, **{name: Abstained(abstained=why) for name in _DECODE_RATES}}
    moved, flops = total(load, steps=steps, requests=requests, positions=context * requests).tolist()
    peak = hardware.kernels.memory_bandwidth.value * hardware.kernels.efficiency.memory.value
    values = (moved / ns, flops / ns / 1e3, 1e3 * moved / peak / steps)
    rates = {name: plain(name, value) for name, value in zip(_DECODE_RATES, values, strict=True)}
    return {_BATCH_SIZE: size, **rates}


def _context(records: Iterable[RequestRecord]) -> float:
    """Mean number of positions that a decoded token attends to, its own included. The first token of an output belongs
    to the prompt. 0 where no token was decoded."""
    decoded = positions = 0
    for record in records:
        tokens = max(record.output_tokens - 1, 0)
        decoded += tokens
        positions += tokens * record.prompt_tokens + tokens * (tokens + 1) // 2
    return positions / decoded if decoded else 0.0


def prompt_metrics(
    load: UnitLoads, records: Sequence[RequestRecord], *, spans: Distribution, logits: bool, why_not: str
) -> Metrics:
    """``spans`` are those of prefills. ``logits``: whether requests have any, unlike embeddings. ``why_not`` is the
    reason for which their work is not known, or empty."""
    ns = spans.mean * len(spans) if len(spans) else 0
    reached = [record for record in records if record.first_token is not None]
    why = why_not or ("" if ns and len(reached) == len(records) else "not every prompt was computed")
    if why:
        return {_PROMPT_METRIC: Abstained(abstained=why)}
    tokens = sum(record.prompt_tokens - record.cached_tokens for record in records)
    pairs = sum(_pairs(record.prompt_tokens) - _pairs(record.cached_tokens) for record in records)
    _, flops = total(load, tokens=tokens, pairs=pairs, requests=len(records) * logits).tolist()
    return {_PROMPT_METRIC: plain(_PROMPT_METRIC, flops / ns / 1e3)}


def _pairs(tokens: int) -> int:
    """Pairs of a token and a position up to its own, among so many tokens."""
    return tokens * (tokens + 1) // 2
