"""Batches of SGLang as batches of schedbench's decoder."""

from __future__ import annotations

from typing import Any

from ....sched.batch import ForwardBatch, ForwardMode
from ..model import long


def decoder_batch(
    batch: Any, context_len: int, *, draft: bool = False, captured: bool = False
) -> ForwardBatch:
    """What the decoder computes, from SGLang's ``ForwardBatch``. Host lengths that SGLang does not keep, or that a
    ``captured`` graph's replays will have, are bounded by the context."""
    lens = None if captured else batch.seq_lens_cpu
    mode, extend_lens = _mode(batch.forward_mode, draft=draft), None
    longest = context_len if lens is None else int(lens.max()) if len(lens) else 0
    if mode.is_extend:
        extend_lens = batch.extend_seq_lens
    return ForwardBatch(
        mode=mode,
        input_ids=long(batch.input_ids),
        positions=long(batch.positions),
        req_pool_indices=long(batch.req_pool_indices),
        seq_lens=long(batch.seq_lens),
        out_cache_loc=long(batch.out_cache_loc),
        max_seq_len=longest,
        extend_lens=extend_lens,
        extend_prefix_lens=batch.extend_prefix_lens if mode.is_extend else None,
        max_extend_len=max(batch.extend_seq_lens_cpu) if mode.is_extend else 1,
        capture_hidden=batch.capture_hidden_mode.need_capture(),
        proxies=getattr(batch, "schedbench_proxies", ()),
    )


def _mode(mode: Any, *, draft: bool) -> ForwardMode:
    if mode.is_target_verify():
        return ForwardMode.TARGET_VERIFY
    if mode.is_draft_extend_v2():
        return ForwardMode.DRAFT_EXTEND
    if mode.is_mixed():
        return ForwardMode.MIXED
    if mode.is_extend():
        return ForwardMode.EXTEND
    if not mode.is_decode():
        return ForwardMode.IDLE
    return ForwardMode.DRAFT if draft else ForwardMode.DECODE
