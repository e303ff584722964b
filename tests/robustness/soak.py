"""One long run in its own process, which reports the live objects: ``python -m tests.robustness.soak 2000 off``. Each
line is a JSON object: requests that ended, steps, seconds, resident bytes, live objects of the package's classes. The
last line comes at the end and includes what the pools hold."""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from array import array
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch

from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.run.machines import Options, open_machine
from schedbench.profiles.run.runner import GatedSink, PreparedRun
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.memory.invariants import check, lost_tokens
from schedbench.sched.observe import Observer, StepInfo
from schedbench.sched.request import Request

# Prefixes are shared, evicted and cut; prompts are chunked and mixed in; requests are retracted and aborted.
BUSY = (
    "device.values=none",
    "engine.relay=latest",
    "engine.max_running_requests=64",
    "engine.schedule_conservativeness=0.05",
    "engine.kv_tokens=2560",
    "workload.arrival={process: closed, concurrency: 96}",
    "workload.prompt_tokens={dist: uniform, min: 8, max: 32}",
    "workload.output_tokens={dist: uniform, min: 1, max: 64}",
    "workload.shared_prefix={groups: 4, tokens: 64}",
    "workload.abort={fraction: 0.05, after_tokens: 3}",
    "expect={}",
)
READINGS = 20


class MemoryReporter(Observer):
    """Reports after every ``total // READINGS`` requests."""

    def __init__(self, total: int) -> None:
        self._every = max(1, total // READINGS)
        self._began = time.perf_counter()
        self._ended = self._steps = self._retracted = 0

    def settled(self, info: StepInfo) -> None:  # noqa: ARG002
        self._steps += 1

    def retracted(self, request: Request) -> None:  # noqa: ARG002
        self._retracted += 1

    def ended(self, request: Request) -> None:  # noqa: ARG002
        self._ended += 1
        if self._ended % self._every == 0:
            self.report()

    def report(self, **more: int) -> None:
        gc.collect()
        reading = {
            "requests": self._ended,
            "steps": self._steps,
            "retractions": self._retracted,
            "seconds": round(time.perf_counter() - self._began, 1),
            "resident": _resident(),
            "alive": Counter(name for thing in gc.get_objects() if (name := _watched(type(thing)))),
        }
        print(json.dumps(reading | more), flush=True)


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _watched(kind: type) -> str:
    """The name of a class whose objects are counted: ours, and arrays; empty for others."""
    return name_of(kind) if kind is array or str(kind.__module__).startswith("schedbench.") else ""


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def pools(scheduler: Scheduler) -> dict[str, int]:
    """Returns the tokens and rows that are still held after the last request."""
    cache = scheduler.engine.cache
    rows = cache.req_to_token_pool
    return {
        "lost": lost_tokens(cache, ()),
        "protected": cache.protected_size(),
        "rows": rows.size - rows.available_size(),
    }


def main(requests: int, *, hazards: bool) -> None:
    torch.set_num_threads(1)
    question = ask("mixed", [*BUSY, f"workload.requests={requests}"])
    sink, reporter = GatedSink(), MemoryReporter(requests)
    with open_machine("vgpu", question, sink, Options(hazards=hazards)) as machine:
        bench = PreparedRun(question, machine, sink)
        bench.warm_up()
        bench.measure(lambda *_: nullcontext(reporter))
        check(bench.scheduler.engine.cache, (), peek=machine.peek)
        reporter.report(**pools(bench.scheduler))


if __name__ == "__main__":
    main(int(sys.argv[1]), hazards=sys.argv[2] == "on")
