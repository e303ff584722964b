"""Builds a scheduler on plain CPU tensors around a real tiny model, for tests of the loops."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from schedbench.sched.batch import ForwardBatch, ModelOutput
from schedbench.sched.config import Capabilities, EngineConfig, SamplingParams
from schedbench.sched.loop.engine import Engine
from schedbench.sched.loop.overlapped import run_overlapped
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.loop.serial import run_serial
from schedbench.sched.memory.chunk import ChunkCache
from schedbench.sched.memory.kv import KVPool
from schedbench.sched.memory.radix import RadixCache
from schedbench.sched.memory.slots import ReqToTokenPool
from schedbench.sched.memory.tokens import PagedAllocator, TokenAllocator
from schedbench.sched.model.decoder import Decoder
from schedbench.sched.model.presets import PRESETS
from schedbench.sched.model.sampler import Sampler
from schedbench.sched.model.weights import seeded_weights
from schedbench.sched.observe import LogicalClock, Observer, Silence
from schedbench.sched.relay.desk import Desk, Streams
from schedbench.sched.relay.futures import FutureMap
from schedbench.sched.relay.row import Relay
from schedbench.sched.relay.states import choose
from schedbench.sched.request import Request

CPU = torch.device("cpu")
PLAIN = Capabilities(pinned_memory=False, side_streams=False, events=True, graphs=False)


class ListSource:
    """Requests at their arrival times; nothing depends on endings."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._waiting = sorted(requests, key=lambda req: req.arrival)
        self.ended_requests: list[Request] = []

    def due(self, now: int) -> Sequence[Request]:
        due = [req for req in self._waiting if req.arrival <= now]
        self._waiting = self._waiting[len(due) :]
        return due

    def next_at(self) -> int | None:
        return self._waiting[0].arrival if self._waiting else None

    def ended(self, request: Request, now: int) -> None:  # noqa: ARG002
        self.ended_requests.append(request)


@dataclass
class CountingRunner:
    """A model that needs no arithmetic: the next token counts up from the last input token of each request."""

    vocab_size: int
    forwards: int = 0

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        self.forwards += 1
        last = batch.input_ids
        if batch.extend_lens is not None:
            last = last[torch.cumsum(batch.extend_lens.to(torch.int64), 0) - 1]
        next_ids = (last + 1) % self.vocab_size
        return ModelOutput(torch.nn.functional.one_hot(next_ids, self.vocab_size).to(torch.float32))


@dataclass
class Room:
    """One run: call it with requests, then look at what is left."""

    config: EngineConfig
    state: str = "latest"
    switches: Mapping[str, str] = field(default_factory=dict)
    observer: Observer = field(default_factory=Silence)
    model: str = "tiny-llama"
    dtype: torch.dtype = torch.float32
    counting: bool = False
    engine: Engine = field(init=False)

    def run(self, requests: Sequence[Request]) -> list[Request]:
        self.engine = self._engine(ListSource(requests))
        scheduler = Scheduler(self.engine)
        with torch.no_grad():
            (run_overlapped if self.config.overlap else run_serial)(scheduler)
        return list(requests)

    def _engine(self, source: ListSource) -> Engine:
        config = self.config
        slots = ReqToTokenPool(config.max_running_requests, config.context_len, device=CPU)
        allocator = (
            TokenAllocator(config.kv_tokens, CPU)
            if config.page_size == 1
            else PagedAllocator(config.kv_tokens, config.page_size, device=CPU)
        )
        streams = Streams.of(config)
        desk = Desk(config, streams, FutureMap(config.max_running_requests + 1, CPU), self.observer)
        return Engine(
            config=config,
            slots=slots,
            allocator=allocator,
            cache=(RadixCache if config.radix_cache else ChunkCache)(slots, allocator),
            runner=CountingRunner(config.vocab_size) if self.counting else self._decoder(slots),
            sampler=Sampler(),
            grammars=None,
            relay=Relay(choose(self.state, self.switches).row(overlap=config.overlap), desk),
            source=source,
            clock=LogicalClock(),
            observer=self.observer,
        )

    def _decoder(self, slots: ReqToTokenPool) -> Decoder:
        shape = replace(PRESETS[self.model], dtype=self.dtype)
        kv = KVPool(
            num_layers=shape.num_layers,
            tokens=self.config.kv_tokens,
            page_size=self.config.page_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            device=CPU,
        )
        weights = seeded_weights(shape, seed=0, device=CPU)
        return Decoder(shape, weights, kv=kv, req_to_token=slots.req_to_token)


def config(**changes: object) -> EngineConfig:
    """A small engine; ``changes`` by EngineConfig field."""
    base = EngineConfig(
        device=CPU,
        capabilities=PLAIN,
        chunked_prefill_size=64,
        max_running_requests=8,
        kv_tokens=2048,
        context_len=512,
        vocab_size=512,
        eos_token_ids=(256,),
        cuda_graph=False,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def requests(
    count: int, *, seed: int = 0, prompt: tuple[int, int] = (4, 150), output: tuple[int, int] = (1, 24),
    shared: int = 32, sampling: SamplingParams = SamplingParams(), every_ns: int = 0,
) -> list[Request]:
    """Random prompts, half of them with a common prefix of ``shared`` tokens."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(257, 512, shared)
    made = []
    for index in range(count):
        tokens = rng.integers(257, 512, rng.integers(*prompt))
        if index % 2:
            tokens = np.concatenate([prefix, tokens])
        params = replace(sampling, max_new_tokens=int(rng.integers(*output)))
        ids = array("q", tokens.tolist())
        made.append(Request(f"r{index}", ids, params, arrival=index * every_ns, index=index))
    return made


def outputs(run: Sequence[Request]) -> dict[str, list[int]]:
    return {req.id: list(req.output_ids) for req in run}
