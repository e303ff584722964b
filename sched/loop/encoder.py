"""The encoder's part of a prompt: taken out of an extend batch (upstream ``prepare_encoder_info_extend``).

A request's prompt begins with its encoder's tokens, and rows and slots are allocated for all of it. Upstream stages the
whole prompt, then strips it and stages the rest once more; a fused preparation strips it first. Unlike upstream's,
``seq_lens`` go on counting both parts, so that allocation and pages are those of any batch; the lengths that upstream
uploads in their place are the model's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from ..batch import EncoderTokens, ScheduleBatch
from ..request import Request
from .engine import Engine


def staged_parts(engine: Engine, reqs: Sequence[Request]) -> list[array[int]]:
    """The ids of the batch's prompts as they are staged first."""
    strip = engine.config.encoder and engine.relay.row.preparation == "fused"
    return [req.tokens(max(req.prefix_len, strip * req.encoder_len), req.fill_len) for req in reqs]


def strip_encoder(engine: Engine, batch: ScheduleBatch) -> None:
    """Leave the decoder's tokens in the batch; those of the encoder become ``batch.encoder``."""
    reqs = batch.reqs
    assert not any(batch.prefix_lens), "the encoder's tokens are computed as a whole"
    whole, lens = batch.extend_lens, [req.encoder_len for req in reqs]
    batch.prefix_lens, batch.extend_lens = lens, [a - b for a, b in zip(whole, lens, strict=True)]
    batch.extend_num_tokens, batch.extend_rows = sum(batch.extend_lens), None
    pieces = batch.out_cache_loc.split(
        [n for pair in zip(lens, batch.extend_lens, strict=True) for n in pair]
    )
    batch.out_cache_loc = torch.cat(pieces[1::2])
    encoder_lens, decoder_lens = _uploaded(engine, lens, batch.extend_lens)
    ids = torch.tensor([id for req in reqs for id in req.tokens(0, req.encoder_len)], dtype=torch.int64)
    staged = ids.pin_memory() if engine.pinned else ids
    batch.encoder = EncoderTokens(staged, torch.cat(pieces[::2]), encoder_lens, decoder_lens)
    if engine.relay.row.preparation == "split":
        engine.relay.rebuild_prompt(batch, [req.tokens(req.encoder_len, req.fill_len) for req in reqs])


def encoder_input(engine: Engine, batch: ScheduleBatch) -> EncoderTokens | None:
    """The encoder's tokens with their ids on the device, by a copy of the current stream."""
    if batch.encoder is None or not batch.forward_mode.is_extend:
        return None
    return batch.encoder._replace(
        input_ids=batch.encoder.input_ids.to(engine.config.device, non_blocking=True)
    )


def _uploaded(engine: Engine, *arrays: list[int]) -> Sequence[torch.Tensor]:
    """[b] int64 each: in one copy by a fused preparation, else one after the other."""
    device, pinned = engine.config.device, engine.pinned
    if engine.relay.row.preparation == "fused":
        packed = torch.tensor(arrays, dtype=torch.int64, pin_memory=pinned)
        return packed.to(device, non_blocking=True).unbind()
    return [
        torch.tensor(each, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)
        for each in arrays
    ]
