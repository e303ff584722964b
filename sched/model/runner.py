"""Runs forwards: decodes by replay of a captured graph if the device supports graphs, all others eagerly."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import torch

from ..batch import ForwardBatch, ForwardMode, ModelOutput
from ..config import EngineConfig
from ..kernels.rows import INPUTS, stage_decode
from .decoder import Model
from .replay import GraphInput, capture_graphs, captured_sizes


class ModelRunner:
    """The constructor captures the graphs on the current stream.

    A graph has one batch size; smaller batches are padded with requests that read and write only padding. All graphs
    read the same input buffers, filled in stream order by one launch, and share one memory pool: an output is valid
    until the next decode of any size.
    """

    def __init__(self, model: Model, config: EngineConfig, proxies: Sequence[GraphInput] = ()) -> None:
        """``proxies`` are the inputs per token that a pipeline stage receives from the preceding one."""
        self._model = model
        self._context_len = config.context_len
        self._sizes = captured_sizes(config)
        if self._sizes:
            self._static = torch.zeros(
                (len(INPUTS), self._sizes[-1]), dtype=torch.int64, device=config.device
            )
            self._proxies = tuple(
                torch.zeros((self._sizes[-1], *entry.shape), dtype=entry.dtype, device=config.device)
                for entry in proxies
            )
        self._captured = capture_graphs(
            config, self._sizes, lambda size: partial(model.forward, self._padding(size))
        )

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        rows = batch.batch_size if batch.graph_rows is None else batch.graph_rows
        place = bisect_left(self._sizes, rows)
        steady = batch.mode.is_decode or batch.mode.is_idle
        if not (rows and steady) or place == len(self._sizes):
            return self._model.forward(batch)
        return self._replay(batch, self._sizes[place])

    def _replay(self, batch: ForwardBatch, size: int) -> ModelOutput:
        stage_decode(
            self._static,
            batch.input_ids,
            batch.positions,
            batch.req_pool_indices,
            batch.seq_lens,
            batch.out_cache_loc,
            size,
        )
        for static, given in zip(self._proxies, batch.proxies, strict=True):
            static[: batch.batch_size] = given
        graph, output = self._captured[size]
        graph.replay()
        return output if size == batch.batch_size else _first_rows(output, batch.batch_size)

    def _padding(self, size: int) -> ForwardBatch:
        """A decode batch that consists of padding, on the static buffers."""
        rows = dict(zip(INPUTS, self._static[:, :size], strict=True))
        rows["seq_lens"].fill_(1)
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            batch_size=size,
            num_tokens=size,
            max_seq_len=self._context_len,
            proxies=tuple(static[:size] for static in self._proxies),
            **rows,
        )


def _first_rows(output: ModelOutput, count: int) -> ModelOutput:
    fingerprint = output.fingerprint
    return ModelOutput(
        output.logits[:count],
        None if fingerprint is None else fingerprint[:count],
        proxies=tuple(proxy[:count] for proxy in output.proxies),
    )
