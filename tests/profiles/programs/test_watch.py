"""Programs watched on the virtual GPU: the lines of their copies, waits and hazards."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from textwrap import dedent

import pytest

from schedbench.profiles.programs.watch import (
    ProgramError,
    WatchRequest,
    _interrupt,
    run_watched,
    watched,
)
from schedbench.profiles.record.result import CopyRow, Metric, Result, SyncRow
from tests.acceptance.runs import hazards_in

TRAINING = """
    import torch
    import torch.nn.functional as F
    model = torch.nn.Linear(16, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    total = 0.0
    for step in range(5):
        x, y = torch.randn(8, 16, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda")
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
"""
LOADING = """
    import torch
    side = torch.cuda.Stream()
    host, out = torch.empty(1 << 16, pin_memory=True), torch.empty(1 << 16, pin_memory=True)
    for step in range(4):
        host.fill_(step)
        with torch.cuda.stream(side):
            x = host.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        out.copy_(x * 2, non_blocking=True)
        {wait}
        out[0].item()
"""
INFERENCE = """
    import sys, torch
    torch.manual_seed(1)
    @torch.inference_mode()
    def generate(steps):
        ids, weights = torch.zeros(4, dtype=torch.long, device="cuda"), torch.randn(32, 32, device="cuda")
        for step in range(steps):
            torch.cuda.nvtx.range_push("generate")
            ids = (weights[ids] @ weights).argmax(-1)
            if (ids == 7).all():
                break
            torch.cuda.nvtx.range_pop()
    generate(int(sys.argv[1]))
"""
MAP = """
    name: generation
    about: each generate range is one step
    steps: {launch: generate, number: order}
    ranges: [{match: generate, name: generate, category: forward}]
    kinds: [{match: generate, kind: decode}]
"""


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(dedent(text).splitlines(), 1) if part in line)


def watch(
    folder: Path, text: str, *arguments: str, meaning: str | None = None, hollow: tuple[str, ...] = ()
) -> Result:
    script = folder / "program.py"
    script.write_text(dedent(text))
    return watched(WatchRequest(str(script), arguments, "h200", True, meaning, hollow))


def lines(rows: tuple[CopyRow, ...] | tuple[SyncRow, ...]) -> dict[int, int]:
    """Counts by source line."""
    found: dict[int, int] = {}
    for row in rows:
        assert row.site is not None
        found[row.site.line] = found.get(row.site.line, 0) + row.count
    return found


def test_a_hidden_sync_of_a_training_step_is_found(tmp_path: Path) -> None:
    found = watch(tmp_path, TRAINING)
    assert lines(found.syncs)[line_of(TRAINING, "loss.item()")] == 5
    assert hazards_in(found).findings == ()
    assert (found.labels.emulated, found.labels.exact, found.labels.capture) == (True, True, "vgpu")
    assert all(metric.exact for metric in found.metrics.values() if isinstance(metric, Metric))


def test_a_missing_wait_of_a_double_buffered_loader_is_found(tmp_path: Path) -> None:
    def found(wait: str) -> set[tuple[int, int]]:
        text = LOADING.replace("{wait}", wait)
        hazards = hazards_in(watch(tmp_path, text))
        pairs = [(finding.first, finding.second) for finding in hazards.findings]
        return {(a.site.line, b.site.line) for a, b in pairs if a.site and b and b.site}

    read = line_of(LOADING, "out.copy_"), line_of(LOADING, "out[0].item()")
    written = line_of(LOADING, "host.to("), line_of(LOADING, "host.fill_")
    assert {read, written} <= found("pass")
    assert found("torch.cuda.synchronize()") == set()


def test_every_access_of_the_host_to_a_buffer_in_flight_is_found(tmp_path: Path) -> None:
    text = """
        import torch
        x = torch.ones(8, 8, device="cuda")
        read, written = torch.empty(8, 8, pin_memory=True), torch.ones(8, 8, pin_memory=True)
        with torch.inference_mode():
            read.copy_(x, non_blocking=True)
            x.copy_(written, non_blocking=True)
            again = read.reshape(64).to("cuda", non_blocking=True), read.contiguous(), read.view(64)[3:], len(read)
            torch.argmax(read)  # found
            read.long()  # found
            read[[1, 2]]  # found
            torch.cat([torch.ones(1, 8), read])  # found
            torch.equal(torch.ones(8, 8), read)  # found
            written.random_(0, 5)  # found
            torch.add(torch.ones(8, 8), 2, out=written)  # found
    """
    hazards = hazards_in(watch(tmp_path, text))
    expected = [k for k, line in enumerate(dedent(text).splitlines(), 1) if line.endswith("# found")]
    assert [at.second.site.line for at in hazards.findings if at.second and at.second.site] == expected


def test_reads_of_an_inference_loop_are_counted_by_step(tmp_path: Path) -> None:
    meaning = tmp_path / "map.yaml"
    meaning.write_text(dedent(MAP))
    found = watch(tmp_path, INFERENCE, "6", meaning=str(meaning))
    assert lines(found.copies)[line_of(INFERENCE, "if (ids == 7)")] == 6
    assert found.per_step["decode"].steps == 6
    (row,) = (row for row in found.syncs if row.site and row.site.line == line_of(INFERENCE, "if (ids == 7)"))
    assert (row.kind, row.range) == ("decode", "generate")


def test_a_hollow_package_is_named(tmp_path: Path) -> None:
    text = """
        import torch, absent_kernels
        absent_kernels.warm_up(3)
        torch.ones(3, device="cuda").sum().item()
    """
    said = str(watch(tmp_path, text, hollow=("absent_kernels", "json")).environment)
    assert "absent_kernels is not installed and was hollow" in said
    assert "absent_kernels.warm_up was called without" in said
    assert "json is not" not in said
    with pytest.raises(ProgramError, match="ModuleNotFoundError"):
        watch(tmp_path, text)


def test_repeats_are_byte_identical(tmp_path: Path) -> None:
    once, again = (watch(tmp_path, INFERENCE, "3").to_json() for _ in range(2))
    assert once == again


def test_threads_that_outlive_the_script_are_counted(tmp_path: Path) -> None:
    text = """
        import concurrent.futures, threading, time, torch
        pool = concurrent.futures.ThreadPoolExecutor()
        pool.submit(int)
        def late():
            time.sleep(0.2)
            torch.ones(3, device="cuda").sum().item()
        threading.Thread(target=late).start()
    """
    assert lines(watch(tmp_path, text).syncs) == {line_of(text, ".item()"): 1}


def test_an_interruption_waits_for_what_it_would_leave_half_done_and_no_longer(tmp_path: Path) -> None:
    """It arrives in a backward pass, and where torch has taken the emulation's mode from its stack for a moment."""
    text = """
        import signal, torch
        from torch import overrides
        pop, x = overrides._pop_mode, torch.ones(3, device="cuda", requires_grad=True)
        def interrupt():
            signal.raise_signal(signal.SIGINT)
        def popped():
            mode = pop()
            interrupt()
            return mode
        x.register_hook(lambda _: interrupt())
        for overrides._pop_mode in pop, popped:
            try:
                x.sum().backward()
                raise SystemExit("not interrupted")
            except KeyboardInterrupt:
                overrides._pop_mode = pop
                assert torch.ones(3, device="cuda").is_cuda
                x.sum().item()
    """
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        found = watch(tmp_path, text)
    finally:
        signal.signal(signal.SIGINT, before)
    assert found.run.failure is None and lines(found.syncs) == {line_of(text, ".item()"): 2}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("owner", "name", "end"), [(Future, "result", "while True: x"), (subprocess.Popen, "wait", "")]
)
def test_an_interruption_between_two_waits_for_the_program_loses_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: type, name: str, end: str
) -> None:
    waits = getattr(owner, name)

    def interrupted(*args: object) -> object:
        monkeypatch.undo()
        found = waits(*args)
        signal.raise_signal(signal.SIGINT)
        return found

    script = tmp_path / "program.py"
    script.write_text(f"import torch\nx = torch.ones(3, device='cuda').sum().item()\n{end}")
    monkeypatch.setattr(owner, name, interrupted)
    found = run_watched(sys.executable, WatchRequest(str(script), (), "h200", True, None))
    assert found.run.cancelled == bool(end)


def test_a_wait_in_a_thread_has_the_line_that_started_it(tmp_path: Path) -> None:
    text = """
        import asyncio, concurrent.futures, threading, torch
        x, pool = torch.ones(3, device="cuda"), concurrent.futures.ThreadPoolExecutor(1)
        async def main():
            await asyncio.to_thread(torch.cuda.current_stream().synchronize)
            await asyncio.to_thread(x.sum().item)
        asyncio.run(main())
        concurrent.futures.wait([pool.submit(x[0].item)])
        pool.submit(x[1].item)
        threading.Thread(target=x.cpu).start()
    """
    numbers = [k for k, line in enumerate(dedent(text).splitlines(), 1) if "wait" in line or "x[1]" in line]
    found = lines(watch(tmp_path, text).syncs)
    assert found == dict.fromkeys([*numbers, line_of(text, "x.cpu")], 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import sys; sys.exit(3)", "exited with 3"),
        ("import sys; sys.exit('no data')", "exited with no data"),
    ],
)
def test_a_failing_program_is_reported(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        watch(tmp_path, body)


def test_a_program_without_device_calls_is_reported(tmp_path: Path) -> None:
    found = watch(tmp_path, "print('no device here')")
    assert (found.copies, found.syncs) == ((), ())
    assert "used no CUDA device" in found.metrics["forward_occupancy"].model_dump_json()
