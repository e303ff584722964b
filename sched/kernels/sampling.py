"""From logits to the next token: greedy, keyed sampling, and the scores of what was chosen; and one pass of block
diffusion's decoding, in which masked tokens become known.

Sampling draws by the Gumbel-max rule with noise that is a pure function of (key, position, token id), so a
row's token does not depend on the batch it stands in. All arithmetic of the noise is on 32-bit words that
wrap; a device kernel that uses uint32 repeats it exactly::

    key64    = mix64(seed + GOLDEN64 * (position + 1))         splitmix64's finaliser
    lo, hi   = low and high word of key64
    word     = mix32(mix32(id + lo) ^ hi)                      lowbias32
    u        = (word & 0x7fffffff) * 2^-31 + 2^-32             float32, in (0, 1]
    noise    = -log(-log(1 - u)), with u limited to 1 - 2^-24

u is small where the noise is large, and float32 is finest near zero: the upper tail that decides a draw over
a large vocabulary reaches 22 instead of the 16.6 that a 24-bit uniform would end at.

A row's seed is ``row_seed(seed of the run, index of the request)``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .arrays import array_of, tensor_of
from .declare import INT64, Work, Written, kernel, meta_tensor, meta_tensors, nbytes
from .invariant import halving_sum
from .tags import mixed

GOLDEN64 = -7046029254386353131  # 0x9e3779b97f4a7c15
_MIX64 = (-4658895280553007687, -7723592293110705685)  # 0xbf58476d1ce4e5b9, 0x94d049bb133111eb
_MIX32 = (0x7FEB352D, -2073254261)  # 0x7feb352d, 0x846ca68b
_WORD64 = (1 << 64) - 1
_NOT_NEGATIVE = np.array(_WORD64 >> 1, dtype=np.uint64)


class Draw(NamedTuple):
    """The arguments of a keyed draw, in the order of the kernels. b rows over a vocabulary of v."""

    logits: Tensor  # [b, v]
    temperatures: Tensor  # [b, 1] float32, 0 for greedy rows
    top_ks: Tensor  # [b] int32, v for no limit
    top_ps: Tensor  # [b] float32
    min_ps: Tensor  # [b] float32
    seeds: Tensor  # [b] int64, of ``row_seed``
    positions: Tensor  # [b] int64, where the drawn token will stand in its request
    vocab_mask: Tensor | None  # [b, ceil(v / 32)] int32, at least one bit set in each row
    filtered: bool  # some row has a top-k, top-p or min-p


# A request's parameters may be columns of one uploaded tensor.
_COLUMNS = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions")


def row_seed(seed: int, index: int) -> int:
    """The key of request ``index`` in a run seeded ``seed``: a signed 64-bit integer."""
    word = _mix64_int(_mix64_int(seed & _WORD64) + index + 1)
    return word - (1 << 64) if word >> 63 else word


def _mix64_int(word: int) -> int:
    word = ((word ^ (word >> 30)) * (_MIX64[0] & _WORD64)) & _WORD64
    word = ((word ^ (word >> 27)) * (_MIX64[1] & _WORD64)) & _WORD64
    return word ^ (word >> 31)


def mix64(words: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 words; shifts are logical, products wrap."""
    words = (words ^ _shift(words, 30, 64)) * _MIX64[0]
    words = (words ^ _shift(words, 27, 64)) * _MIX64[1]
    return words ^ _shift(words, 31, 64)


def _mix32(words: Tensor) -> Tensor:
    words = (words ^ _shift(words, 16, 32)) * _MIX32[0]
    words = (words ^ _shift(words, 15, 32)) * _MIX32[1]
    return words ^ _shift(words, 16, 32)


def _shift(words: Tensor, bits: int, width: int) -> Tensor:
    return (words >> bits) & ((1 << (width - bits)) - 1)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Noise [b, vocab_size] float32 of rows keyed by seeds [b] and positions [b], both int64."""
    keys = mix64(seeds + (positions + 1) * GOLDEN64).unsqueeze(1)
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    words = _mix32(_mix32(ids + low) ^ high) & 0x7FFFFFFF
    uniform = (words.to(torch.float32) * 2.0**-31 + 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def unpack_mask(vocab_mask: Tensor, vocab_size: int) -> Tensor:
    """[b, vocab_size] bool from words [b, ceil(vocab_size / 32)] int32; bit i of word w is id 32 w + i."""
    bits = torch.arange(32, dtype=torch.int32, device=vocab_mask.device)
    return ((vocab_mask.unsqueeze(2) >> bits) & 1).bool().flatten(1)[:, :vocab_size]


def _masked(logits: Tensor, vocab_mask: Tensor | None) -> Tensor:
    if vocab_mask is None:
        return logits
    return logits.masked_fill(~unpack_mask(vocab_mask, logits.shape[1]), -torch.inf)


def _scaled(draw: Draw) -> Tensor:
    """Allowed logits over temperature; a greedy row's stay as they are."""
    return _masked(draw.logits, draw.vocab_mask) / _unit(draw.temperatures)


def _unit(temperatures: Tensor) -> Tensor:
    return torch.where(temperatures > 0, temperatures, 1.0)


def _kept(scaled: Tensor, draw: Draw) -> Tensor:
    """[b, v] bool: ids that pass all three filters; the first of the most likely ids always does.

    The filters act on the same distribution. top-p keeps the smallest set of most likely ids whose
    mass reaches top_p. The mass is summed in rank order in float64, one row like the other.
    """
    ranked, order = scaled.sort(dim=1, descending=True, stable=True)
    weights = torch.exp(ranked - ranked[:, :1]).double()
    mass = weights.cumsum(1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    top_ps = draw.top_ps.unsqueeze(1)
    kept = (before < top_ps.double() * mass[:, -1:]) | (top_ps >= 1)
    kept &= (weights >= draw.min_ps.unsqueeze(1)) & (rank < draw.top_ks.unsqueeze(1))
    return torch.empty_like(kept).scatter_(1, order, kept | (rank == 0))


def _scores(draw: Draw) -> Tensor:
    """The scores [b, v] that the argmax is taken of. A greedy row's scores are its logits."""
    scaled = _scaled(draw)
    noise = gumbel_noise(draw.seeds, draw.positions, scaled.shape[1])
    scores = scaled + torch.where(draw.temperatures > 0, noise, 0.0)
    return scores.masked_fill(~_kept(scaled, draw), -torch.inf) if draw.filtered else scores


def _tagged_ids(logits: Tensor, vocab_mask: Tensor | None, fingerprint: Tensor) -> Tensor:
    """The (h mod n)-th of the n allowed ids, h a hash of the fingerprint. Only the logits' shape is used."""
    hashed = mixed(array_of(fingerprint).view(np.uint64).copy())
    hashed &= _NOT_NEGATIVE
    words = hashed.view(np.int64)
    if vocab_mask is None:
        words %= logits.shape[1]
        return tensor_of(words)
    allowed = unpack_mask(vocab_mask, logits.shape[1]).cumsum(1)
    nth = torch.from_numpy(words).unsqueeze(1) % allowed[:, -1:] + 1
    return torch.searchsorted(allowed, nth).squeeze(1)


def _ids_meta(logits: Tensor) -> Tensor:
    return meta_tensor(logits.shape[0])


def _greedy_cost(logits: Tensor, vocab_mask: Tensor | None) -> Work:
    return Work(nbytes(logits, vocab_mask) + INT64 * logits.shape[0])


def _draw_cost(draw: Draw) -> Work:
    """A draw reads the logits once. A filtered draw is costed as the sort-free kernels are built: one pass for the
    maximum and the mass, one to find the threshold, one to draw."""
    tensors = nbytes(*(value for value in draw if isinstance(value, Tensor)))
    again = 2 * nbytes(draw.logits) if draw.filtered else 0
    return Work(tensors + again + INT64 * draw.logits.shape[0])


@kernel(meta=_ids_meta, cost=_greedy_cost)
def sample_greedy(logits: Tensor, vocab_mask: Tensor | None) -> Tensor:
    """ids [b] int64 of the largest of logits [b, v] that vocab_mask allows; of equals the lowest id."""
    return _masked(logits, vocab_mask).argmax(1)


@kernel(meta=_ids_meta, cost=_greedy_cost, unread_floats=True)
def sample_greedy_tagged(logits: Tensor, vocab_mask: Tensor | None, fingerprint: Tensor) -> Tensor:
    """As ``sample_greedy`` in cost; the id is a hash of fingerprint [b] int64 and no logit is read."""
    return _tagged_ids(logits, vocab_mask, fingerprint)


@kernel(meta=_ids_meta, cost=_draw_cost, strided=_COLUMNS)
def sample(draw: Draw) -> Tensor:
    """ids [b] int64 drawn with keyed noise; a row of temperature 0 takes its largest logit."""
    return _scores(draw).argmax(1)


@kernel(meta=_ids_meta, cost=_draw_cost, unread_floats=True)
def sample_tagged(draw: Draw, fingerprint: Tensor) -> Tensor:
    """As ``sample`` in cost; the id is a hash of fingerprint [b] int64 and no logit is read."""
    return _tagged_ids(draw.logits, draw.vocab_mask, fingerprint)


@kernel(
    meta=lambda logits: meta_tensors(2, logits.shape[0], dtype=torch.float32),
    cost=_draw_cost,
    strided=_COLUMNS,
)
def score_tokens(draw: Draw, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and margin, [b] float32 each, of the ids [b] that ``sample`` drew from the same draw.

    The probability is that under mask and temperature (1 for greedy rows), before the filters. The margin is
    how far the best score is ahead of the second, in units of the logits; it says nothing about how
    near a token was to the threshold of a filter.
    """
    logprobs = _scaled(draw).double().log_softmax(1).gather(1, ids.unsqueeze(1)).squeeze(1)
    best, second = _scores(draw).topk(2, dim=1).values.unbind(1)
    return logprobs.float(), ((best - second) * _unit(draw.temperatures).squeeze(1)).float()


@kernel(cost=lambda logits, scaling: Work(2 * nbytes(logits) + nbytes(scaling)))
def scale_repeated(logits: Written, scaling: Tensor) -> None:
    """Divides positive logits [b, v] by scaling [b, v] and multiplies the others (arXiv 1909.05858)."""
    logits.copy_(torch.where(logits > 0, logits / scaling, logits * scaling))


@kernel(
    cost=lambda target, stops, output_lens, min_new_tokens: Work(
        2 * nbytes(target) + nbytes(stops, output_lens, min_new_tokens)
    ),
)
def withhold_stops(target: Written, stops: Tensor, output_lens: Tensor, min_new_tokens: Tensor) -> None:
    """Subtracts stops [b, v] (inf at stop tokens, else 0) from target [b, v] in rows whose output_lens [b, 1]
    is below min_new_tokens [b, 1]."""
    target.sub_(torch.where(output_lens < min_new_tokens, stops, 0.0))


def _reveal(input_ids: Tensor, found: Tensor, confidence: Tensor, mask_id: int, threshold: float) -> None:
    """Replace the masks of input_ids [b, block] whose confidence exceeds the threshold, and in a block that has masks
    the most confident one in any case."""
    masked = input_ids == mask_id
    confidence = confidence.masked_fill(~masked, -1)
    best = torch.zeros_like(masked).scatter_(
        1, confidence.argmax(1, keepdim=True), masked.any(1, keepdim=True)
    )
    input_ids.copy_(torch.where(best | (confidence > threshold), found, input_ids))


def _unmask_cost(input_ids: Tensor, logits: Tensor) -> Work:
    return Work(2 * nbytes(input_ids) + nbytes(logits))


@kernel(cost=_unmask_cost)
def unmask(input_ids: Written, logits: Tensor, mask_id: int, threshold: float, block: int) -> None:
    """Replaces masks in input_ids [T] by the likeliest tokens of logits [T, v], where they are likely enough. T is a
    multiple of ``block``; no token from ``mask_id`` on is found. The confidence is the token's probability."""
    scores = logits[:, :mask_id].double()
    most, found = scores.max(1)
    confidence = 1 / halving_sum(torch.exp(scores - most.unsqueeze(1))).squeeze(1)
    _reveal(input_ids.view(-1, block), found.view(-1, block), confidence.view(-1, block), mask_id, threshold)


@kernel(cost=_unmask_cost, unread_floats=True)
def unmask_tagged(
    input_ids: Written, logits: Tensor, fingerprint: Tensor, mask_id: int, threshold: float, block: int
) -> None:
    """As ``unmask`` in cost; tokens and confidences are hashes of fingerprint [b] int64 and the place in the block.
    Only the logits' shape is used."""
    places = torch.arange(1, block + 1, device=fingerprint.device) * GOLDEN64
    words = mix64(fingerprint.unsqueeze(1) + places)
    confidence = (mix64(words) & 0xFFFFFF).double() / 0x1000000
    _reveal(
        input_ids.view(-1, block),
        (words & 0x7FFFFFFF) % (logits.shape[1] - 1),
        confidence,
        mask_id,
        threshold,
    )
