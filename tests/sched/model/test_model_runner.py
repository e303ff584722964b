"""Decoding by graphs on the virtual GPU gives what the eager model gives, in two launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.profiles.vgpu.gpu import open_vgpu
from schedbench.sched.batch import ForwardBatch, ForwardMode, ModelOutput
from schedbench.sched.config import Capabilities, EngineConfig
from schedbench.sched.kernels.rows import decode_positions, extend_positions
from schedbench.sched.model import runner
from schedbench.sched.model.config import PRESETS
from schedbench.sched.model.decoder import Decoder, Model
from schedbench.sched.model.runner import ModelRunner, graph_sizes
from schedbench.sched.model.tags import TaggedDecoder, TagPool
from schedbench.sched.model.weights import empty_weights, seeded_weights
from tests.acceptance.runs import executed, resolved
from tests.profiles.recorders import WindowRecorder
from tests.sched.model.stages import decoder_stage, kv_pool

CONFIG = replace(PRESETS["tiny-llama"], num_layers=1, max_positions=128)
CONTEXT, ROWS = 96, 6


class ModelOnDevice:
    """A device with a model, and requests of equal length."""

    def __init__(self, gpu: VirtualGpu, launches: WindowRecorder, *, values: str) -> None:
        self.gpu, self.launches, self.values = gpu, launches, values
        self.rows = torch.arange(ROWS * CONTEXT).view(ROWS, CONTEXT) + 1
        padding = torch.zeros(1, CONTEXT, dtype=torch.int64)
        self.table = torch.cat([padding, self.rows]).to(torch.int32).to(gpu.device)

    def model(self) -> Model:
        """Returns a model with the same weights each time and its own cache."""
        device = self.gpu.device
        kv = kv_pool(CONFIG, ROWS * CONTEXT, device=device)
        if self.values == "real":
            weights = seeded_weights(CONFIG, seed=0, device=device)
            return Decoder(CONFIG, weights, kv=kv, req_to_token=self.table)
        decoder = Decoder(CONFIG, empty_weights(CONFIG, device=device), kv=kv, req_to_token=self.table)
        pool = TagPool(slots=kv.slots, context_len=CONTEXT, device=device)
        return TaggedDecoder(decoder, pool=pool, req_to_token=self.table)

    def runner(self, **changes: Any) -> ModelRunner:
        config = EngineConfig(
            device=self.gpu.device,
            capabilities=Capabilities(),
            max_running_requests=4,
            context_len=CONTEXT,
            graph_batch_sizes=(4, 1, 2, 8),
        )
        return ModelRunner(self.model(), replace(config, **changes))

    def extend(self, count: int, length: int) -> ForwardBatch:
        lens, new = torch.full((count,), length), torch.full((count,), length, dtype=torch.int32)
        positions = extend_positions(lens.to(self.gpu.device), new.to(self.gpu.device), count * length)
        batch = self._batch(ForwardMode.EXTEND, lens, self.rows[:count, :length], positions)
        return replace(batch, extend_lens=new.to(self.gpu.device), max_extend_len=length)

    def decode(self, count: int, length: int) -> ForwardBatch:
        lens = torch.full((count,), length)
        slots = self.rows[:count, length - 1 : length]
        return self._batch(ForwardMode.DECODE, lens, slots, decode_positions(lens.to(self.gpu.device)))

    def _batch(
        self, mode: ForwardMode, lens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> ForwardBatch:
        device = self.gpu.device
        ids = (slots * 7 + lens.unsqueeze(1)).flatten() % CONFIG.vocab_size
        return ForwardBatch(
            mode=mode,
            input_ids=ids.to(device),
            positions=positions,
            req_pool_indices=torch.arange(1, len(lens) + 1).to(device),
            seq_lens=lens.to(device),
            out_cache_loc=slots.flatten().to(device),
            max_seq_len=int(lens.max()),
        )

    def observe(self, body: Callable[[], object]) -> list[str]:
        self.gpu.flush()
        self.launches.windows.clear()
        body()
        self.gpu.flush()
        return self.launches.names


@pytest.fixture
def on_device() -> Callable[..., AbstractContextManager[ModelOnDevice]]:
    @contextmanager
    def opened(values: str = "real") -> Iterator[ModelOnDevice]:
        launches = WindowRecorder()
        with open_vgpu(load("h200"), values=values, sink=launches) as gpu:  # type: ignore[arg-type]
            yield ModelOnDevice(gpu, launches, values=values)

    return opened


def found(output: ModelOutput) -> list[Any]:
    kept = output.logits if output.fingerprint is None else output.fingerprint
    return kept.to("cpu").tolist()


@pytest.mark.parametrize("values", ["real", "none"])
def test_replayed_decodes_are_the_eager_ones(on_device: Callable[..., Any], values: str) -> None:
    with on_device(values) as at:
        graphs, eager = at.runner(), at.runner(cuda_graph=False)
        for runner in (graphs, eager):
            runner.forward(at.extend(4, 62))
        for length, count in enumerate((4, 3, 2, 1, 4, 3), start=63):
            batch = at.decode(count, length)
            assert found(graphs.forward(batch)) == found(eager.forward(batch))


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"max_running_requests": 3}, [1, 2, 4]),
        ({"max_running_requests": 3, "most_requests": 1}, [1]),
    ],
)
def test_batches_that_no_decode_can_have_get_no_graph(changes: dict[str, int], sizes: list[int]) -> None:
    config = EngineConfig(
        device=torch.device("cpu"), capabilities=Capabilities(), graph_batch_sizes=(4, 1, 2, 8)
    )

    assert graph_sizes(replace(config, **changes)) == sizes  # type: ignore[arg-type]


@pytest.mark.parametrize(("warmup", "most"), [(0, 4), (7, 8)])
def test_a_run_captures_no_graph_beyond_its_requests(
    monkeypatch: pytest.MonkeyPatch, warmup: int, most: int
) -> None:
    captured: list[int] = []
    capture = runner.capture_graphs

    def noted(config: EngineConfig, sizes: list[int], prepare: Any) -> Any:
        captured.extend(sizes)
        return capture(config, sizes, prepare)

    monkeypatch.setattr(runner, "capture_graphs", noted)
    executed(resolved("overlap_on", "workload.requests=3", f"measure.warmup_requests={warmup}"))
    assert max(captured) == most


@pytest.mark.parametrize(
    ("changes", "decoding", "eager"),
    [
        ({}, 3, 0),
        ({"max_running_requests": 3}, 4, 0),  # sizes stop at the first that holds all
        ({"max_running_requests": 3}, 5, 12),
        ({"cuda_graph": False}, 3, 12),
        ({"capabilities": Capabilities(graphs=False)}, 3, 12),
        ({}, 0, 13),
    ],
)
def test_a_decode_with_a_graph_is_one_launch_and_one_replay(
    on_device: Callable[..., Any], changes: dict[str, Any], decoding: int, eager: int
) -> None:
    """``decoding``: requests, or 0 for an extend. ``eager``: the kernels that are launched instead: embedding, norm,
    nine for the layer, logits, and in an extend those of the last tokens."""
    with on_device() as at:
        runner, batch = at.runner(**changes), at.decode(decoding, 5) if decoding else at.extend(2, 5)

        names = at.observe(lambda: runner.forward(batch))

    assert len(names) == eager if eager else names == ["stage_decode", "graph[12]"]


def test_the_host_has_no_graphs() -> None:
    cpu = torch.device("cpu")
    scene = decoder_stage(CONFIG, seeded_weights(CONFIG, seed=0, device=cpu))
    runner = ModelRunner(scene.model, EngineConfig(device=cpu, capabilities=Capabilities()))
    sequence = scene.enter([1, 2, 3])
    runner.forward(scene.batch([(sequence, 2)]))

    assert runner.forward(scene.batch([(sequence, 1)])).logits.shape == (1, CONFIG.vocab_size)
