"""A scheduler on plain CPU tensors: with a real tiny model, or with one whose answers can be predicted."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import pytest
import torch

from schedbench.sched.batch import ForwardBatch, ModelOutput
from schedbench.sched.config import Capabilities, EngineConfig, SamplingParams
from schedbench.sched.loop.engine import Engine
from schedbench.sched.loop.event_loops import run_overlapped, run_serial
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.memory.cache import ChunkCache, RadixCache
from schedbench.sched.memory.pools import KVAllocator, PagedAllocator, ReqToTokenPool
from schedbench.sched.memory.tier import KVTier
from schedbench.sched.model.config import PRESETS
from schedbench.sched.model.decoder import Decoder, Model
from schedbench.sched.model.grammar import GrammarCache
from schedbench.sched.model.sampling import Sampler
from schedbench.sched.model.weights import seeded_weights
from schedbench.sched.observe import Observer, StepInfo
from schedbench.sched.relay.choice import choose
from schedbench.sched.relay.context import UNSTASHED, FutureMap, FutureRing
from schedbench.sched.relay.row import Relay
from schedbench.sched.request import Request
from schedbench.sched.streams import Streams
from tests.sched.model.stages import kv_pool

CPU = torch.device("cpu")
PLAIN = Capabilities(pinned_memory=False, side_streams=False, events=True, graphs=False)
VOCAB = 512
EOS = 256
GREEDY = SamplingParams()
LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "serial"])


class TickingClock:
    """Advances by a microsecond at every reading, so that arrivals fall between steps."""

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        self._now += 1000
        return self._now

    def sleep_until(self, at: int) -> None:
        self._now = max(self._now, at)


class ListSource:
    """Delivers requests at their arrival times; nothing depends on endings."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._waiting = sorted(requests, key=lambda req: req.arrival)
        self.handed_out: list[Request] = []
        self.ended_requests: list[Request] = []

    def due(self, now: int) -> Sequence[Request]:
        due = [req for req in self._waiting if req.arrival <= now]
        self._waiting = self._waiting[len(due) :]
        self.handed_out += due
        return due

    def next_at(self) -> int | None:
        return self._waiting[0].arrival if self._waiting else None

    def ended(self, request: Request, now: int) -> None:  # noqa: ARG002
        self.ended_requests.append(request)


class RecallRunner:
    """A model that consists of its KV cache: a slot keeps the token and position written to it, and the next token
    follows from all slots that a request's row of the page table leads to. ``recalled_answer`` predicts its output."""

    def __init__(self, req_to_token: torch.Tensor, slots: int) -> None:
        self._req_to_token = req_to_token
        self._kept = torch.zeros(slots, dtype=torch.int64)

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        assert bool((batch.input_ids >= 0).all()), "a token was gathered before it was stashed"
        if batch.extend_lens is not None:
            assert torch.equal(batch.extend_prefix_lens + batch.extend_lens, batch.seq_lens.to(torch.int32))
        self._kept[batch.out_cache_loc] = batch.input_ids * VOCAB + batch.positions
        rows = self._req_to_token[batch.req_pool_indices, : batch.max_seq_len].to(torch.int64)
        place = torch.arange(batch.max_seq_len)
        seen = torch.where(place < batch.seq_lens[:, None], self._kept[rows] * (2 * place + 1), 0)
        next_ids = seen.sum(1) % PRIME % VOCAB
        return ModelOutput(torch.nn.functional.one_hot(next_ids, VOCAB).to(torch.float32))


PRIME = 10007


def recalled_answer(req: Request) -> list[int]:
    """Returns what ``RecallRunner`` answers to ``req`` without an abort."""
    seen, output = 0, []
    tokens = list(req.origin_input_ids)
    stops = {*req.sampling.stop_token_ids, *(() if req.sampling.ignore_eos else (EOS,))}
    for position in count():
        seen += (tokens[position] * VOCAB + position) * (2 * position + 1)
        if position < len(req.origin_input_ids) - 1:
            continue
        output.append(seen % PRIME % VOCAB)
        if output[-1] in stops or len(output) == req.sampling.max_new_tokens:
            return output
        tokens.append(output[-1])
    raise AssertionError


def check_answers(done: Iterable[Request]) -> None:
    for req in done:
        assert list(req.output_ids) == recalled_answer(req)


class ForgettingPool(ReqToTokenPool):
    """A newly allocated row holds no token: the relay's row is reset to its state before the first stash."""

    futures: FutureMap | None = None

    def alloc(self, n: int) -> list[int] | None:
        rows = super().alloc(n)
        if rows and self.futures is not None:
            self.futures.output_tokens_buf[rows] = UNSTASHED
        return rows


class WatchedScheduler(Scheduler):
    """Calls ``watch(scheduler)`` at the top of every iteration, before anything is received."""

    def __init__(self, engine: Engine, watch: Callable[[Scheduler], None]) -> None:
        super().__init__(engine)
        self._watch = watch

    def receive(self) -> None:
        self._watch(self)
        super().receive()


def no_watch(scheduler: Scheduler) -> None:
    """The watch of a run without an audit."""


@dataclass
class EngineRun:
    """One run of an engine on the CPU: call ``run`` with requests, then examine what is left."""

    config: EngineConfig
    state: str = "latest"
    switches: Mapping[str, str] = field(default_factory=dict)
    observer: Observer = field(default_factory=Observer)
    model: str = "tiny-llama"
    recall: bool = False
    watch: Callable[[Scheduler], None] = no_watch
    engine: Engine = field(init=False)
    source: ListSource = field(init=False)
    current: Scheduler = field(init=False)

    def run(self, requests: Sequence[Request]) -> list[Request]:
        scheduler = self.scheduler(requests)
        with torch.no_grad():
            (run_overlapped if self.config.overlap else run_serial)(scheduler)
        return list(requests)

    def scheduler(self, requests: Sequence[Request]) -> Scheduler:
        self.source = ListSource(requests)
        self.engine = self._engine()
        self.current = WatchedScheduler(self.engine, self.watch)
        return self.current

    def _engine(self) -> Engine:
        config = self.config
        slots = ForgettingPool(config.max_running_requests, config.context_len, device=CPU)
        allocator = (
            KVAllocator(config.kv_tokens, 1, CPU)
            if config.page_size == 1
            else PagedAllocator(config.kv_tokens, config.page_size, device=CPU)
        )
        relay = Relay.of(
            choose(self.state, self.switches).row(overlap=config.overlap),
            config,
            streams=Streams.of(config),
            observer=self.observer,
            req_to_token=slots.req_to_token,
        )
        if not isinstance(relay.context.futures, FutureRing):
            slots.futures = relay.context.futures
        return Engine(
            config=config,
            slots=slots,
            allocator=allocator,
            cache=(RadixCache if config.radix_cache else ChunkCache)(slots, allocator),
            tier=KVTier(allocator),
            runner=self._runner(relay.context.pages),
            sampler=Sampler(),
            grammars=GrammarCache(config.vocab_size, config.eos_token_ids),
            relay=relay,
            source=self.source,
            clock=TickingClock(),
            observer=self.observer,
        )

    def _runner(self, pages: torch.Tensor) -> Model:
        if self.recall:
            return RecallRunner(pages, self.config.kv_tokens + self.config.page_size)
        shape = PRESETS[self.model]
        kv = kv_pool(shape, self.config.kv_tokens, page_size=self.config.page_size)
        weights = seeded_weights(shape, seed=0, device=CPU)
        return Decoder(shape, weights, kv=kv, req_to_token=pages)


def config(**changes: object) -> EngineConfig:
    """A small engine; ``changes`` by EngineConfig field."""
    base = EngineConfig(
        device=CPU,
        capabilities=PLAIN,
        chunked_prefill_size=64,
        max_running_requests=8,
        kv_tokens=2048,
        context_len=512,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        cuda_graph=False,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def request(
    name: str,
    tokens: Iterable[int],
    max_new_tokens: int = 4,
    *,
    arrival: int = 0,
    index: int = 0,
    sampling: SamplingParams = GREEDY,
) -> Request:
    params = replace(sampling, max_new_tokens=max_new_tokens)
    return Request(name, array("q", tokens), params, arrival=arrival, index=index)


def requests(
    number: int,
    *,
    seed: int = 0,
    prompt: tuple[int, int] = (4, 150),
    output: tuple[int, int] = (1, 24),
    shared: int = 32,
    sampling: SamplingParams = GREEDY,
    every_ns: int = 0,
) -> list[Request]:
    """Random prompts, half of them with a common prefix of ``shared`` tokens."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(EOS + 1, VOCAB, shared)
    made = []
    for index in range(number):
        tokens = rng.integers(EOS + 1, VOCAB, rng.integers(*prompt))
        if index % 2:
            tokens = np.concatenate([prefix, tokens])
        made.append(
            request(
                f"r{index}",
                tokens.tolist(),
                int(rng.integers(*output)),
                arrival=index * every_ns,
                index=index,
                sampling=sampling,
            )
        )
    return made


class RunRecorder(Observer):
    """Records what happened in a run: its steps, and the number of retractions."""

    def __init__(self) -> None:
        self.launches: list[StepInfo] = []
        self.settled_steps: list[StepInfo] = []
        self.retractions = 0

    def launched(self, info: StepInfo) -> None:
        self.launches.append(info)

    def settled(self, info: StepInfo) -> None:
        self.settled_steps.append(info)

    def retracted(self, request: Request) -> None:  # noqa: ARG002
        self.retractions += 1

    @property
    def kinds(self) -> set[str]:
        return {info.kind for info in self.launches}


def outputs(run: Sequence[Request]) -> dict[str, list[int]]:
    return {req.id: list(req.output_ids) for req in run}
