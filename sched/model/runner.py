"""Runs decodes, and other functions of tensors, by replay of a captured graph if the device supports graphs; everything
else eagerly."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from ..batch import ForwardBatch, ForwardMode, ModelOutput
from ..config import EngineConfig
from ..kernels.rows import INPUTS, DecodeInputs, stage_decode, stage_rows
from .decoder import Model

T = TypeVar("T")
Function = Callable[..., Sequence[torch.Tensor]]


class GraphInput(NamedTuple):
    """An input with one row per request."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class GraphedFunction:
    """``function(*inputs, max_seq_len)`` with inputs [b, ...] and outputs [b · n, ...], where n may differ per output.

    The constructor captures a graph for each batch size on the current stream. Smaller batches are padded with zeros,
    which ``function`` must accept. An output of a graph is valid until the next call.
    """

    def __init__(
        self, function: Function, inputs: Sequence[GraphInput], config: EngineConfig, *, longest: int
    ) -> None:
        """``longest`` is the host's bound on lengths in a graph."""
        self._function = function
        self._sizes = captured_sizes(config)
        self._static = _static_inputs(inputs, self._sizes, config)
        self._captured = capture_graphs(
            config,
            self._sizes,
            lambda size: partial(function, *(static[:size] for static in self._static), longest),
        )

    def __call__(self, *inputs: torch.Tensor, max_seq_len: int) -> Sequence[torch.Tensor]:
        batch_size = inputs[0].shape[0]
        place = bisect_left(self._sizes, batch_size)
        if place == len(self._sizes):
            return self._function(*inputs, max_seq_len)
        size = self._sizes[place]
        for static, given in zip(self._static, inputs, strict=True):
            if given.is_floating_point():
                static[:batch_size] = given  # the padding may have any value
            else:
                stage_rows(static, given, size)
        graph, outputs = self._captured[size]
        graph.replay()
        return (
            outputs if size == batch_size else [out[: out.shape[0] // size * batch_size] for out in outputs]
        )


def _static_inputs(
    inputs: Sequence[GraphInput], sizes: Sequence[int], config: EngineConfig
) -> list[torch.Tensor]:
    """Buffers for graphs of these ``sizes`` to read; none without graphs."""
    return [
        torch.zeros((sizes[-1], *entry.shape), dtype=entry.dtype, device=config.device)
        for entry in inputs
        if sizes
    ]


def graph_sizes(config: EngineConfig) -> Sequence[int]:
    """The configured sizes in order, up to the first that holds every request that may run."""
    sizes = sorted(set(config.graph_batch_sizes))
    return sizes[: bisect_left(sizes, min(config.max_running_requests, config.most_requests)) + 1]


def captured_sizes(config: EngineConfig) -> Sequence[int]:
    """``graph_sizes``; none if the engine or its device has no graphs."""
    graphs = config.cuda_graph and config.capabilities.graphs and config.device.type != "cpu"
    return graph_sizes(config) if graphs else ()


def capture_graphs(
    config: EngineConfig, sizes: Sequence[int], prepare: Callable[[int], Callable[[], T]]
) -> dict[int, tuple[Any, T]]:
    """Capture a graph for each batch size on the current stream. Returns each graph with the output that its replays
    write. ``prepare`` makes the function to capture; the largest size comes first, so that the smaller ones fit into
    the pool's memory."""
    captured: dict[int, tuple[Any, T]] = {}
    if not sizes:
        return captured
    module: Any = torch.get_device_module(config.device)
    pool = module.graph_pool_handle()
    for size in reversed(sizes):
        run = prepare(size)
        if config.capabilities.first_run:
            run()  # which must not be captured
        graph = module.CUDAGraph()
        with module.graph(graph, pool=pool, stream=module.current_stream()):
            output = run()
        captured[size] = graph, output
    return captured


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
        self._proxies = _static_inputs(proxies, self._sizes, config)
        self._captured = capture_graphs(
            config, self._sizes, lambda size: partial(model.forward, self._padding(size))
        )

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        rows = batch.batch_size if batch.graph_rows is None else batch.graph_rows
        place = bisect_left(self._sizes, rows)
        steady = (batch.mode.is_decode or batch.mode.is_idle) and not batch.capture_hidden
        if not (rows and steady) or place == len(self._sizes):
            return self._model.forward(batch)
        return self._replay(batch, self._sizes[place])

    def _replay(self, batch: ForwardBatch, size: int) -> ModelOutput:
        inputs = (batch.input_ids, batch.positions, batch.req_pool_indices, batch.seq_lens)
        self._stage(DecodeInputs(*inputs, batch.out_cache_loc), size)
        count = batch.batch_size
        for static, given in zip(self._proxies, batch.proxies, strict=True):
            static[:count] = given
        graph, output = self._captured[size]
        graph.replay()
        return output if size == count else _first_rows(output, count)

    def _stage(self, inputs: DecodeInputs, size: int) -> None:
        stage_decode(self._static, *inputs, size)

    def _padding(self, size: int) -> ForwardBatch:
        """A decode batch that consists of padding, on the static buffers."""
        rows = dict(zip(INPUTS, self._static[:, :size], strict=True))
        rows["seq_lens"].fill_(1)
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            max_seq_len=self._context_len,
            proxies=tuple(static[:size] for static in self._proxies),
            **rows,
        )


def _first_rows(output: ModelOutput, count: int) -> ModelOutput:
    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(
            0, 0, min(count, tensor.shape[0])
        )  # a stage that is not the last one has no logits

    fingerprint = output.fingerprint
    return ModelOutput(
        rows(output.logits),
        None if fingerprint is None else rows(fingerprint),
        proxies=tuple(map(rows, output.proxies)),
    )
