"""Host time of the scheduler per decode step and per admitted request, without a model (``make bench``)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

import torch

from ...sched.batch import ForwardBatch, ModelOutput
from ...sched.config import Capabilities, EngineConfig, SamplingParams
from ...sched.hisparse.tier import KVTier
from ...sched.loop.engine import Engine
from ...sched.loop.event_loops import run_overlapped
from ...sched.loop.scheduler import Scheduler
from ...sched.memory.pools import ReqToTokenPool
from ...sched.memory.radix import RadixCache
from ...sched.memory.tokens import TokenAllocator
from ...sched.model.sampler import TokenScores
from ...sched.model.sampling_info import SamplingInfo
from ...sched.observe import LogicalClock, Observer
from ...sched.relay.choice import choose
from ...sched.relay.row import Relay
from ...sched.request import Request
from ...sched.streams import Streams

CPU = torch.device("cpu")
# Microseconds by number of running requests, and per admitted prompt.
DECODE_AIMS = {8: 91.0, 64: 188.0, 256: 521.0}
ADMIT_AIM = 111.0
PROMPT_TOKENS = 512
PROMPTS_PER_STEP = 16
STEPS = 200
REPEATS = 5


class _NullModel:
    """A runner and sampler that return constant tensors."""

    def __init__(self, most: int) -> None:
        self._output = ModelOutput(torch.zeros(most, 1))
        self._tokens = torch.zeros(most, dtype=torch.int64)

    def forward(self, batch: ForwardBatch) -> ModelOutput:  # noqa: ARG002
        return self._output

    def sample(self, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return self._tokens[: seq_lens.shape[0]]

    def score(
        self,
        output: ModelOutput,  # noqa: ARG002
        info: SamplingInfo,  # noqa: ARG002
        seq_lens: torch.Tensor,  # noqa: ARG002
        ids: torch.Tensor,  # noqa: ARG002
    ) -> TokenScores:
        raise AssertionError("no request asks for scores")


class _Burst:
    """All requests at once. The loop calls ``due`` at the start of each iteration, which timestamps it."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._stamps: list[int] = []

    def due(self, now: int) -> Sequence[Request]:  # noqa: ARG002
        self._stamps.append(time.thread_time_ns())
        requests, self._requests = self._requests, ()
        return requests

    def next_at(self) -> None:
        return None

    def ended(self, request: Request, now: int) -> None: ...

    @property
    def iterations_us(self) -> list[float]:
        return [(end - start) / 1e3 for start, end in pairwise(self._stamps)]


def figures() -> Iterator[tuple[str, float, float]]:
    """The name, the microseconds and the aim of each figure; takes some seconds."""
    torch.set_num_threads(1)
    with torch.no_grad():
        for running, aim in DECODE_AIMS.items():
            yield f"decode step, {running} running", decode_step_us(running), aim
        yield f"admitting {PROMPT_TOKENS} tokens", admission_us(), ADMIT_AIM


def decode_step_us(running: int) -> float:
    """Host time of a decode step in which no request joins or ends."""
    rounds = [_iterations_us(running, prompt_tokens=16, new_tokens=STEPS) for _ in range(REPEATS + 1)]
    margin = STEPS // 4  # prompts and endings
    return median(median(times[margin : STEPS - margin]) for times in rounds[1:])


def admission_us(prompts: int = 256) -> float:
    """Host time per request of a prefill step: matching, memory, batch, launch, and the update of the radix tree."""
    rounds = [_iterations_us(prompts, PROMPT_TOKENS, new_tokens=4) for _ in range(REPEATS + 1)]
    steps = prompts // PROMPTS_PER_STEP
    return median(median(times[1:steps]) for times in rounds[1:]) / PROMPTS_PER_STEP


def _iterations_us(number: int, prompt_tokens: int, new_tokens: int) -> list[float]:
    """Time of each iteration of the overlapped loop."""
    burst = _Burst([_request(index, prompt_tokens, new_tokens) for index in range(number)])
    run_overlapped(Scheduler(_engine(number, prompt_tokens + new_tokens, burst)))
    return burst.iterations_us


def _request(index: int, prompt_tokens: int, new_tokens: int) -> Request:
    first = index * prompt_tokens  # no two prompts share a prefix
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    return Request(f"r{index}", array("q", range(first, first + prompt_tokens)), sampling, 0, index)


def _engine(most: int, tokens: int, source: _Burst) -> Engine:
    config = EngineConfig(
        device=CPU,
        capabilities=Capabilities(pinned_memory=False, side_streams=False, graphs=False),
        chunked_prefill_size=PROMPT_TOKENS * PROMPTS_PER_STEP,
        max_running_requests=most,
        kv_tokens=2 * most * tokens + 1024,
        context_len=tokens,
        cuda_graph=False,
    )
    slots = ReqToTokenPool(most, tokens, device=CPU)
    allocator = TokenAllocator(config.kv_tokens, CPU)
    model, observer = _NullModel(most), Observer()
    relay = Relay.of(
        choose("latest", {}).row(overlap=True),
        config,
        streams=Streams.of(config),
        observer=observer,
        req_to_token=slots.req_to_token,
    )
    return Engine(
        config=config,
        slots=slots,
        allocator=allocator,
        cache=RadixCache(slots, allocator),
        tier=KVTier(allocator),
        runner=model,
        sampler=model,
        grammars=None,
        relay=relay,
        source=source,
        clock=LogicalClock(),
        observer=observer,
    )
