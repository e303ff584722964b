"""Parts of a step, measured in this process (``make bench``): host time of the scheduler, without a model, per decode
step and per admitted request; and of the virtual GPU per op, over torch's own, and per decode step."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from ...sched.batch import ForwardBatch, ModelOutput
from ...sched.config import Capabilities, EngineConfig, SamplingParams
from ...sched.kernels.declare import Work, kernel, meta_like, nbytes
from ...sched.loop.engine import Engine
from ...sched.loop.event_loops import run_overlapped
from ...sched.loop.scheduler import Scheduler
from ...sched.memory.cache import RadixCache
from ...sched.memory.pools import KVAllocator, ReqToTokenPool
from ...sched.memory.tier import KVTier
from ...sched.model.sampling import Sampler, SamplingInfo
from ...sched.observe import LogicalClock, Observer, StepInfo
from ...sched.relay.choice import choose
from ...sched.relay.row import Relay
from ...sched.request import Request
from ...sched.streams import Streams
from ..platform.hardware import load
from ..record.timeline import Window
from ..vgpu.device import VirtualGpu
from ..vgpu.gpu import Values, open_vgpu

Body = Callable[[], object]
Figures = Iterator[tuple[str, float, float]]
"""The name, the microseconds and the aim of each figure."""

CPU = torch.device("cpu")
# Microseconds by number of running requests, and per admitted prompt.
DECODE_AIMS = {8: 91.0, 64: 188.0, 256: 521.0}
ADMIT_AIM = 111.0
PROMPT_TOKENS = 512
PROMPTS_PER_STEP = 16
STEPS = 200
REPEATS = 5
OP_AIM, STEP_AIM = 6.0, 220.0  # microseconds


class _NullModel(Sampler):
    """A runner and sampler that return constant tensors."""

    def __init__(self, most: int) -> None:
        self._output = ModelOutput(torch.zeros(most, 1))
        self._tokens = torch.zeros(most, dtype=torch.int64)

    def forward(self, batch: ForwardBatch) -> ModelOutput:  # noqa: ARG002
        return self._output

    def sample(self, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return self._tokens[: seq_lens.shape[0]]


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


def scheduler_figures() -> Figures:
    """Host times of the scheduler. Takes some seconds."""
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
    allocator = KVAllocator(config.kv_tokens, 1, CPU)
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


class _Discard:
    """A sink that keeps nothing."""

    def feed(self, window: Window) -> None: ...


def vgpu_figures(repeat: int = 300) -> Figures:
    """What the virtual GPU adds to torch's own time on the CPU, and a decode step. Takes some seconds."""
    torch.set_num_threads(1)
    with torch.no_grad():
        host = {name: _best(body, repeat) for name, body in _small_ops(CPU)}
    with _opened("real") as gpu:
        own = {name: _best(body, repeat, gpu.flush) for name, body in _small_ops(gpu.device)}
    yield from ((name, own[name] - host[name], OP_AIM) for name in own)
    with _opened("none") as gpu:
        step = _best(_decode_step(gpu), 30, gpu.flush)
    yield "decode step, values none", step, STEP_AIM


@contextmanager
def _opened(values: Values) -> Iterator[VirtualGpu]:
    with open_vgpu(load("h200"), values=values, sink=_Discard(), watch=[Path(__file__)]) as gpu:
        yield gpu


def _best(body: Body, repeat: int, finish: Body = lambda: None) -> float:
    """Microseconds of this thread per call: the fastest of many short rounds, because the machine may be busy. A round
    ends with ``finish``, which makes the records of its calls."""
    rounds = []
    for _ in range(60):
        start = time.thread_time_ns()
        for _ in range(repeat):
            body()
        finish()
        rounds.append((time.thread_time_ns() - start) / repeat / 1e3)
    return min(rounds)


def _small_ops(device: torch.device) -> list[tuple[str, Body]]:
    x = torch.arange(50).to(device)
    y = torch.ones(50, dtype=torch.int64).to(device)
    index = torch.arange(0, 50, 2).to(device)
    return [
        ("add", lambda: x + y),
        ("add_", lambda: y.add_(1)),
        ("slice", lambda: x[1:9]),
        ("x[i]", lambda: x[index]),
        ("index_select", lambda: x.index_select(0, index)),
        ("cat of 2", lambda: torch.cat([x, y])),
    ]


def _decode_step(gpu: VirtualGpu) -> Body:
    """The device calls of a steady decode step of an overlapped loop: 26 dispatches, a replay, a copy, an event."""
    module, device, observer = torch.get_device_module(gpu.device), gpu.device, gpu.observer
    n = 50  # requests
    page_table = torch.zeros(n, 4096, dtype=torch.int32, device=device)
    rows_, lens = torch.arange(n, device=device), torch.full((n,), 100, device=device)
    slots, tokens = torch.arange(n, device=device), torch.zeros(n, dtype=torch.int64, device=device)
    ring = torch.zeros(512, dtype=torch.int64, device=device)
    static = [torch.zeros(n, dtype=torch.int64, device=device) for _ in range(5)]
    replay = _captured(gpu, static[0])
    forward, copied = module.Stream(), torch.empty(n, dtype=torch.int64, pin_memory=True)
    schedule, done = module.current_stream(), module.Event()
    steps = iter(range(1 << 30))

    def step() -> None:
        i = next(steps)
        with observer.range("prepare", i, n):
            schedule.wait_stream(forward)
            page_table[rows_, lens] = slots.to(torch.int32)
            ahead = lens + 1
        forward.wait_stream(schedule)
        with module.stream(forward):
            with observer.range("resolve", i, n):
                ids = torch.where(tokens < 0, ring[tokens], tokens)
            with observer.range("model", i, n):
                for target, source in zip(static, (ids, ahead, rows_, slots, lens), strict=True):
                    target[:n].copy_(source[:n])
                replay()
            with observer.range("publish", i, n):
                ring[1 : n + 1] = static[0]
                tokens.copy_(static[1] - static[1])
            with observer.range("copy", i, n):
                copied.copy_(static[0], non_blocking=True)
                done.record()
        info = StepInfo(step=i, kind="decode", batch_size=n, num_tokens=n, steady=True)
        observer.launched(info)
        with observer.range("settle", i, n):
            done.synchronize()
            copied.tolist()
        observer.settled(info)

    return step


def _captured(gpu: VirtualGpu, ids: torch.Tensor) -> Callable[[], None]:
    """A graph of 300 kernels on floats, and one on integers."""
    module = torch.get_device_module(gpu.device)
    hidden = torch.zeros(ids.numel(), 64, device=gpu.device)
    layer = _layer()
    graph = module.CUDAGraph()
    with module.graph(graph):
        for _ in range(300):
            hidden = layer(hidden)
        ids.add_(1)
    replay: Callable[[], None] = graph.replay
    return replay


@cache
def _layer() -> Callable[[torch.Tensor], torch.Tensor]:
    @kernel(meta=lambda x: meta_like(x), cost=lambda x: Work(2 * nbytes(x)), footprint=lambda: ())
    def bench_layer(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return bench_layer
