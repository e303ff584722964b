"""How the prompt's token ids get from the host to the forward: ``stage_prompt`` (schedule side)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from ..batch import ScheduleBatch
from .desk import Desk

Parts = Sequence["array[int]"]


def stage_pinned(desk: Desk, batch: ScheduleBatch, parts: Parts) -> None:
    """Flatten into pinned memory; the copy to the device is the forward stream's (#25945)."""
    flat = flatten_numpy(desk, batch, parts)
    batch.prefill_input_ids_cpu = flat.pin_memory() if desk.pinned else flat


def stage_pageable(desk: Desk, batch: ScheduleBatch, parts: Parts) -> None:
    batch.prefill_input_ids_cpu = flatten_numpy(desk, batch, parts)


def flatten_numpy(desk: Desk, batch: ScheduleBatch, parts: Parts) -> torch.Tensor:
    """Concatenate int64 buffers (#25098). Views on the parts are gone when this returns: an array cannot grow while
    one is alive."""
    with desk.observer.range("flatten", batch.step, batch.extend_num_tokens):
        return torch.from_numpy(np.concatenate([np.frombuffer(part, dtype=np.int64) for part in parts]))
