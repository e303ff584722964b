"""The process's own counts compared with the virtual GPU's, which are made independently."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from schedbench.profiles.cuda.dispatch_counts import DispatchCounter
from schedbench.profiles.lab import single_run
from schedbench.profiles.lab.verification import verify
from schedbench.profiles.platform.hardware import load
from schedbench.profiles.record.result import Result
from schedbench.profiles.vgpu.gpu import open_vgpu
from schedbench.profiles.vgpu.sites import Sites
from schedbench.sched.observe import StepInfo

pytestmark = pytest.mark.wide

PLAIN = (
    "workload.arrival={process: burst}",
    "workload.requests=6",
    "workload.output_tokens={dist: uniform, min: 4, max: 16}",
    "workload.sampling.ignore_eos=true",
)
INLINE = 65536


class Tensors(NamedTuple):
    """A tensor on the host, and one on the device."""

    h: torch.Tensor
    d: torch.Tensor


@contextmanager
def counting() -> Iterator[tuple[torch.device, Any, DispatchCounter]]:
    """A virtual GPU, its module in torch, and what counts there."""
    with open_vgpu(load("h200")) as gpu:
        module = torch.get_device_module(gpu.device)
        yield gpu.device, module, DispatchCounter(module, "vgpu", Sites([Path(__file__)]), inline=INLINE)


def counted(action: Callable[[Tensors], object], elements: int = 16) -> dict[str, tuple[int, int]]:
    """Returns how often, and with how many bytes, each kind of event was counted while the action ran."""
    with counting() as (device, _, listener):
        tensors = Tensors(torch.zeros(elements), torch.zeros(elements, device=device))
        with listener.installed(), listener.range("prepare", 3, 1):
            action(tensors)
    found: dict[str, tuple[int, int]] = {}
    for row, count in listener.counts.items():
        before = found.get(row.what, (0, 0))
        found[row.what] = (before[0] + count, before[1] + listener.bytes[row])
    return found


SYNC = "cudaStreamSynchronize"
UP, DOWN, READ = "h2d pageable blocking", "d2h pageable blocking", "d2h pinned blocking"


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (lambda t: t.h.to(t.d.device), {UP: (1, 64), SYNC: (1, 0)}),
        (lambda t: t.h.to(t.d.device, non_blocking=True), {"h2d pageable": (1, 64)}),
        (lambda t: t.h.pin_memory().to(t.d.device, non_blocking=True), {"h2d pinned": (1, 64)}),
        (lambda t: t.h.pin_memory().to(t.d.device), {"h2d pinned blocking": (1, 64), SYNC: (1, 0)}),
        (lambda t: t.d.copy_(t.h), {UP: (1, 64), SYNC: (1, 0)}),
        (lambda t: t.d.cpu(), {DOWN: (1, 64), SYNC: (1, 0)}),
        (lambda t: t.d.to("cpu", non_blocking=True), {"d2h pinned": (1, 64)}),
        (lambda t: t.h.copy_(t.d, non_blocking=True), {DOWN: (1, 64)}),
        (lambda t: t.d[0].item(), {READ: (1, 4), SYNC: (1, 0)}),
        (lambda t: t.d[t.d > 1], {READ: (1, 4), SYNC: (1, 0)}),
        (lambda t: t.d[[0, 2]], {UP: (1, 16), SYNC: (1, 0)}),
        (lambda t: t.d.nonzero(), {READ: (1, 4), SYNC: (1, 0)}),
        (lambda t: t.d.masked_fill_(t.d > 1, 0.0), {}),
        (lambda t: torch.tensor([1, 2], device=t.d.device), {UP: (1, 16), SYNC: (1, 0)}),
        (lambda t: t.d[:0].cpu(), {}),
        (lambda t: t.h + t.h, {}),
        (lambda t: t.d + t.d, {}),
    ],
)
def test_counts_of_expressions(
    action: Callable[[Tensors], object], expected: dict[str, tuple[int, int]]
) -> None:
    assert counted(action) == expected


def test_a_large_pageable_upload_blocks() -> None:
    found = counted(lambda t: t.h.to(t.d.device, non_blocking=True), elements=INLINE)
    assert found == {UP: (1, 4 * INLINE)}


def test_waits_name_the_stream_that_is_waited_for() -> None:
    with counting() as (_, module, listener):
        side, event = module.Stream(), module.Event()
        with listener.installed():
            event.record(side)
            event.synchronize()
            side.synchronize()
            module.synchronize()
        found = {(one.what, one.stream) for one in listener.counts}
        here = module.current_stream().stream_id
    assert found == {
        ("cudaEventSynchronize", side.stream_id),
        ("cudaStreamSynchronize", side.stream_id),
        ("cudaDeviceSynchronize", here),
    }


def test_rows_have_step_range_stream_and_line() -> None:
    with counting() as (device, module, listener):
        with listener.installed(), listener.range("prepare", 3, 1):
            torch.zeros(2).to(device)
        with listener.installed(), listener.range("prepare", 4, 1):  # of no step that was launched
            torch.zeros(2).to(device)
        listener.launched(StepInfo(3, "decode", 1, 1, True))
        names = {module.current_stream().stream_id: "schedule"}
        found = single_run.counts_document(listener, names)
    assert found["steps"] == {"decode": 1}
    waited, copied = found["rows"]
    assert (copied["what"], copied["count"], copied["bytes"]) == ("h2d pageable blocking", 1, 8)
    assert waited["what"] == SYNC
    for row in (copied, waited):
        assert (row["kind"], row["stream"], row["range"]) == ("decode", "schedule", "prepare")
        assert row["statement"] == "torch.zeros(2).to(device)"


@pytest.mark.parametrize(
    ("scenario", "more"),
    [
        ("mixed", ("engine.relay=pr25774-before",)),
        ("penalties", ("engine.overlap=false",)),
        ("grammar", ()),
        ("hisparse", ()),
        ("spec_v1", ()),
    ],
)
def test_counts_of_whole_runs_equal_the_virtual_gpus(
    tmp_path: Path, scenario: str, more: tuple[str, ...]
) -> None:
    """Compares every copy with its bytes and every sync, by line."""
    words = [word for override in (*PLAIN, *more) for word in ("--set", override)]
    files = [tmp_path / name for name in ("predicted.json", "announced.json")]
    for option, output in zip(((), ("--counted",)), files, strict=True):
        assert single_run.main([scenario, "--device", "vgpu", *words, *option, "--output", str(output)]) == 0
    predicted = Result.from_json(files[0].read_text())
    found = verify(predicted, json.loads(files[1].read_text()), predicted)
    assert found["unexplained"] == []
    assert found["agrees"]
    assert sum(row["announced"] is not None and row["announced"]["count"] > 0 for row in found["rows"]) >= 8
