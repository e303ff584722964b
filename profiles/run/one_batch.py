"""A static batch without the scheduler: one prefill of all prompts, then a decode of all requests per output token.

Preparation and launch are those of the serial loop, with the relay's resolve in every launch. The host waits for the
device before and after each step, so that a step's latency has nothing of its neighbours. Tokens are read between two
steps, outside of both, and appended to their requests, since penalties count them there. The latencies make a versioned
document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from statistics import median
from typing import Any, Final, NamedTuple

from ...scenarios.combinations import MODES
from ...scenarios.workload_schema import BurstArrivals, Fixed
from ...sched.admission import init_next_round_input
from ...sched.batch import ScheduleBatch
from ...sched.loop.engine import Engine
from ...sched.loop.launch import launch_step
from ...sched.loop.prepare import prepare_for_decode, prepare_for_extend
from ...sched.memory.allocation import release_kv_cache
from ...sched.request import Request
from ..platform.machine import Machine
from ..platform.resolve import Resolved
from ..record.conclusion import number_of, numbers
from ..record.environment import environment, tool
from ..record.result import digest
from .crash import broken_on_purpose, exits_are_crashes
from .feed import measured_workload
from .machines import DeviceChoice, device_kind, open_machine
from .runner import GatedSink, PreparedRun

# Modes whose engine is more than the serial loop's preparation and launch.
OTHER_ENGINES: Final = (
    "speculation",
    "hisparse",
    "pipeline",
    "disaggregation",
    "data-parallel ranks",
    "replicas",
    "block diffusion",
    "deferred",
    "split prefill",
    "embedding",
    "grammar",
)


class OneBatchError(ValueError):
    """A scenario whose engine is not that of one static batch."""


class BatchShape(NamedTuple):
    """``prompt`` and ``output`` are tokens of each request."""

    batch: int
    prompt: int
    output: int

    @property
    def tokens(self) -> int:
        return self.batch * (self.prompt + self.output)


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """``decodes`` has a latency for each token behind the first; ns. ``outputs``: tokens by request."""

    shape: BatchShape
    prefill: int
    decodes: Sequence[int]
    outputs: Mapping[str, Sequence[int]]

    @property
    def decode(self) -> float | None:
        """The median latency of a decode; None with a single output token."""
        return median(self.decodes) if self.decodes else None

    @property
    def total(self) -> int:
        return self.prefill + sum(self.decodes)

    @property
    def digest(self) -> str:
        return digest(self.outputs.items())


def one_batch(resolved: Resolved, shape: BatchShape) -> Resolved:
    """The scenario whose scheduler would run this batch. Raises OneBatchError."""
    for mode in OTHER_ENGINES:
        if MODES[mode].on(resolved.scenario):
            raise OneBatchError(f"onebatch runs the serial loop's engine without {mode}")
    scenario = resolved.scenario
    workload = {
        "requests": shape.batch,
        "arrival": BurstArrivals(process="burst"),
        "prompt_tokens": Fixed(dist="fixed", value=shape.prompt),
        "output_tokens": Fixed(dist="fixed", value=shape.output),
        "shared_prefix": None,
        "abort": None,
        "trace": None,
        "format": None,
        "controls": (),
    }
    engine = {
        "overlap": False,
        "radix_cache": False,
        "mixed_chunk": False,
        "chunked_prefill_size": None,
        "max_prefill_tokens": max(scenario.engine.max_prefill_tokens, shape.tokens),
        "max_running_requests": max(scenario.engine.max_running_requests, shape.batch),
    }
    sections = {
        "workload": scenario.workload.model_copy(update=workload),
        "engine": scenario.engine.model_copy(update=engine),
    }
    return replace(resolved, scenario=scenario.model_copy(update={**sections, "faults": ()}))


def too_large(resolved: Resolved, shape: BatchShape) -> str:
    """Why the batch cannot run, of which ``resolved`` is the scenario by ``one_batch``; empty if it can."""
    workload, page = measured_workload(resolved), resolved.scenario.engine.page_size
    if workload.achieved.clipped:
        return f"prompt and {number_of(shape.output, 'token')} exceed the context of {resolved.model.max_positions}"
    lengths = [len(req.origin_input_ids) + shape.output for req in workload.upcoming()]
    needed = sum(-(-length // page) * page for length in lengths)
    if needed > resolved.scenario.engine.kv_tokens // page * page:
        return f"{needed} KV tokens are needed, and engine.kv_tokens is {resolved.scenario.engine.kv_tokens}"
    return ""


def run_batches(resolved: Resolved, machine: Machine, shapes: Sequence[BatchShape]) -> Iterator[BatchTimes]:
    """Run the batches one after the other on one engine. Where times do not repeat exactly, each runs once before."""
    largest = BatchShape(*map(max, zip(*shapes, strict=True)))
    engine = PreparedRun(one_batch(resolved, largest), machine, GatedSink()).scheduler.engine
    appends = all(fault.appends for fault in resolved.relay.faults)
    for shape in shapes:
        resolved_batch, steps = one_batch(resolved, shape), count(1)
        for _ in range(1 if machine.labels.exact else 2):
            reqs = list(measured_workload(resolved_batch).upcoming())
            times = _run_batch(engine, machine, shape, reqs, steps=steps, appends=appends)
        yield times


def _run_batch(
    engine: Engine,
    machine: Machine,
    shape: BatchShape,
    reqs: Sequence[Request],
    *,
    steps: Iterator[int],
    appends: bool,
) -> BatchTimes:
    """``steps`` has the numbers of the steps; with ``appends`` requests get their tokens."""
    outputs, latencies = {req.id: list[int]() for req in reqs}, list[int]()
    clock, device = machine.clock, engine.streams.module
    batch: ScheduleBatch | None = None
    with engine.streams.on(engine.streams.schedule), machine.host.running():
        for req in reqs:
            init_next_round_input(req, engine.cache)
        for step in islice(steps, shape.output):
            device.synchronize()
            begin = clock.now()
            with engine.observer.range("prepare", step, len(reqs)):
                if batch is None:
                    batch = prepare_for_extend(engine, reqs, step)
                else:
                    prepare_for_decode(engine, batch, step)
            result = launch_step(engine, batch, overlapped=False)
            device.synchronize()
            latencies.append(clock.now() - begin)
            assert result.next_token_ids is not None
            for req, token in zip(reqs, result.next_token_ids.tolist(), strict=True):
                outputs[req.id].append(token)
                if appends:
                    req.output_ids.append(token)
        for req in reqs:
            release_kv_cache(req, engine.cache, is_insert=False)
    return BatchTimes(shape, latencies[0], latencies[1:], outputs)


SCHEMA_VERSION: Final = "1.0"
NS_PER_MS: Final = 1e6
NS_PER_S: Final = 1e9

Document = dict[str, Any]


@exits_are_crashes()
def document(
    resolved: Resolved, shapes: Sequence[BatchShape], device: DeviceChoice, notice: Callable[[str], None]
) -> Document:
    """Run all shapes that fit. ``run`` of the document is the caller's. Raises OneBatchError and
    MachineError."""
    relay, kind = resolved.relay, device_kind(device, resolved.scenario)
    refused = {shape: too_large(one_batch(resolved, shape), shape) for shape in shapes}
    fitting = [shape for shape in shapes if not refused[shape]]
    content: Document = {"labels": None}
    times: dict[BatchShape, BatchTimes] = {}
    if fitting:
        whole = one_batch(resolved, fitting[0])
        with open_machine(kind, whole, GatedSink()) as machine, broken_on_purpose(relay):
            content["labels"] = machine.labels.model_dump(mode="json")
            content["hardware"] = machine.hardware.model_dump(mode="json")
            for found in run_batches(resolved, machine, fitting):
                times[found.shape] = found
                notice(f"{len(times)} of {len(fitting)}")
    points = [
        {
            **shape._asdict(),
            **{name: figure(times[shape]) if shape in times else None for name, figure in _FIGURES.items()},
            "refused": refused[shape] or None,
        }
        for shape in shapes
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": tool().model_dump(mode="json"),
        "environment": environment(),
        "scenario": {"expanded": resolved.scenario.expanded(), "sha256": resolved.scenario.sha256},
        "relay": {
            "state": relay.state.name,
            "policies": relay.policies(overlap=False),
            "faults": [fault.name for fault in relay.faults],
        },
        "conclusion": conclusion(points, content),
        **content,
        "points": points,
    }


_FIGURES: Final[Mapping[str, Callable[[BatchTimes], object]]] = {
    "prefill_ms": lambda times: times.prefill / NS_PER_MS,
    "prefill_throughput": lambda times: times.shape.batch * times.shape.prompt * NS_PER_S / times.prefill,
    "decode_ms": lambda times: None if times.decode is None else times.decode / NS_PER_MS,
    "decode_throughput": lambda times: (
        None if times.decode is None else times.shape.batch * NS_PER_S / times.decode
    ),
    "total_ms": lambda times: times.total / NS_PER_MS,
    "throughput": lambda times: times.shape.tokens * NS_PER_S / times.total,
    "digest": lambda times: times.digest,
}


def conclusion(points: Sequence[Document], machine: Document) -> str:
    """Return the latencies of the smallest and of the largest batch that ran. ``machine``: its labels and hardware."""
    ran = sorted(
        (p for p in points if not p["refused"]), key=lambda p: (p["batch"] * p["prompt"], p["batch"])
    )
    ends = ran[:1] + ran[1:][-1:]
    said = []
    for point in ends:
        decode = "" if point["decode_ms"] is None else f", a decode {point['decode_ms']:.3g} ms"
        size = f"{point['batch']} x {number_of(point['prompt'], 'prompt token')}"
        said.append(f"a prefill takes {point['prefill_ms']:.3g} ms{decode} for {size}")
    return f"{'; '.join(said)} ({numbers(machine['labels'], machine['hardware']['name'])})." if said else ""
