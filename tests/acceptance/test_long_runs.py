"""The memory of a run does not grow with its length, and is freed with the run."""

from __future__ import annotations

import gc
import tracemalloc
from contextlib import nullcontext

import pytest

from schedbench.profiles.vgpu.runtime import Runtime
from schedbench.sched.observe import Observer, StepInfo
from tests.acceptance.runs import prepared_run, resolved
from tests.conftest import RunCommand

STEPS = 600
EVERY = 50


class MemoryLog(Observer):
    """Records the bytes of Python objects every few steps."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def settled(self, info: StepInfo) -> None:
        if info.step % EVERY == 0:
            gc.collect()
            self.bytes.append(tracemalloc.get_traced_memory()[0])


@pytest.mark.wide
def test_memory_does_not_grow_with_the_steps() -> None:
    """Records accumulate until a window is cut, some hundred KiB every 250 steps, and are then freed. What remains of a
    step is less than its share of 64 KiB."""
    log = MemoryLog()
    few = ("workload.requests=4", "workload.arrival=burst", f"workload.output_tokens={STEPS}")
    tracemalloc.start()
    try:
        with prepared_run(resolved("decode_heavy", *few)) as (_, composed):
            composed.measure(lambda *_: nullcontext(log))
    finally:
        tracemalloc.stop()
    warm = log.bytes[1:]
    half = len(warm) // 2
    assert len(warm) == STEPS // EVERY
    assert max(warm) - min(warm) > 2**17  # records accumulate in between
    assert min(warm[half:]) - min(warm[:half]) < 2**16


def test_a_watched_run_frees_its_device(run_command: RunCommand) -> None:
    """What a storage keeps is hidden from Python's garbage collector."""

    def devices() -> int:
        gc.collect()
        return sum(isinstance(one, Runtime) for one in gc.get_objects())

    before = devices()
    said = run_command("run", "start", "--hazards", "on", "--set", "requests=2", "--set", "output_tokens=3")
    assert said.code == 0 and devices() == before
