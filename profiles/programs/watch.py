"""Runs a script that was written for torch on CUDA on a virtual GPU, and makes a result document of what it did.

The script runs in a process of its own (``profiles.programs.process``). Steps are found in its NVTX ranges by the maps
that captures use; without a map that fits, copies, syncs and hazards are counted for the whole program.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

from ...sched.observe import StepInfo, StepKind
from ..captures import maps
from ..captures.capture import CapturedRange, ProfilerCapture
from ..captures.files import chosen
from ..captures.maps import RangeMap
from ..captures.measure import CaptureReading, document
from ..captures.steps import read_steps
from ..platform.hardware import load
from ..record.environment import environment
from ..record.provenance import RunPart
from ..record.result import PROGRAM, Abstained, Result
from ..record.timeline import Window
from ..run.declared_hazards import split_declared
from ..vgpu.device import VirtualGpu
from ..vgpu.gpu import open_vgpu
from ..vgpu.ledger import LedgerContext
from ..vgpu.patching import attributes_set
from .cuda_program import NvtxRanges
from .hollow import hollow_packages
from .torch_cuda import cuda_answered
from .triton_kernels import triton_interpreted

# The step of a program whose ranges define none.
_WHOLE: Final = StepInfo(0, cast(StepKind, PROGRAM), 0, 0, False)


class WatchRequest(NamedTuple):
    """``map`` is the name or the file of a map of the program's NVTX ranges, or None for a shipped one that fits.
    ``hollow`` names packages that may be absent."""

    script: str
    arguments: tuple[str, ...]
    hardware: str
    hazards: bool
    map: str | None
    hollow: tuple[str, ...] = ()


class ProgramError(RuntimeError):
    """The watched program failed."""


class _Windows:
    """A sink that joins all windows into one."""

    def __init__(self) -> None:
        self.window = Window(0, 0)

    def feed(self, window: Window) -> None:
        whole = self.window
        whole.end = window.end
        whole.ops += window.ops
        whole.calls += window.calls
        whole.waits += window.waits


def watched(request: WatchRequest) -> Result:
    """Raises ProgramError if the program ends with an error, HardwareError, MapError, OSError."""
    hardware, windows = load(request.hardware), _Windows()
    beside = sorted(Path(request.script).resolve().parent.iterdir())  # files are named from this folder on
    with (
        open_vgpu(hardware, sink=windows, watch=beside, hazards=request.hazards, gradients=True) as gpu,
        cuda_answered(gpu, hardware) as program,
        triton_interpreted(gpu) as kernels,
        hollow_packages(request.hollow) as packages,
    ):
        _run(request)
    notes = (*program.notes(), *kernels.notes(), *packages.notes())
    return _document(request, hardware.name, gpu, program.nvtx, windows.window, notes)


def _run(request: WatchRequest) -> None:
    """Run the script as ``python script arguments`` does."""
    folder = str(Path(request.script).resolve().parent)
    argv, path = [request.script, *request.arguments], [folder, *sys.path]
    with attributes_set([(sys, "argv", argv), (sys, "path", path)]):
        try:
            runpy.run_path(request.script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ProgramError(f"exited with {end.code}") from end


def _document(
    request: WatchRequest,
    gpu_name: str,
    gpu: VirtualGpu,
    nvtx: NvtxRanges,
    window: Window,
    notes: tuple[str, ...],
) -> Result:
    spans = sorted(nvtx.closed, key=lambda span: (span.start, -span.end))
    facts = {**environment(), "gpu": gpu_name, "cuda_graph_trace": "graph"}
    capture = ProfilerCapture("vgpu", spans, rows=lambda _: [], facts=facts)
    meaning = chosen(capture) if request.map is None else maps.load(request.map)
    found = _reading(gpu, window, spans, meaning, notes)
    hazards = (
        split_declared(gpu.findings, ())
        if request.hazards
        else Abstained(abstained="hazards were not watched for")
    )
    run = RunPart(id="", command="", started="", wall_s=0.0)
    return document(capture, meaning, found, name=Path(request.script).stem, run=run, hazards=hazards)


def _reading(
    gpu: VirtualGpu,
    window: Window,
    spans: Sequence[CapturedRange],
    meaning: RangeMap,
    notes: tuple[str, ...],
) -> CaptureReading:
    steps = read_steps(spans, meaning, epoch=0)
    if not steps.launches:
        steps.log.contexts.change(-1, LedgerContext("", 0, False))
        steps.log.launched.append(_WHOLE)
        steps.log.settled.append(_WHOLE)
        notes += ("no NVTX range of the map launches a step: the whole program counts as one",)
    context = steps.log.contexts.at
    places = ((op, context(op.launched)) for op in window.ops)
    window.ops = [op._replace(range=at.range, step=at.step, forward=at.forward) for op, at in places]
    callers = ((call, context(call.start)) for call in window.calls)
    window.calls = [call._replace(range=at.range, step=at.step) for call, at in callers]
    window.ranges, window.launched, window.settled = steps.log.ranges, steps.log.launched, steps.log.settled
    unfit = None if window.ops else "the program used no CUDA device"
    return CaptureReading(window, gpu.sites, gpu.streams, steps, notes, unfit)
