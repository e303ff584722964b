"""``schedbench profile``: record one run with Nsight Systems or torch.profiler, and report the capture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import arguments
from .errors import INTERRUPTED
from .text import echo

if TYPE_CHECKING:
    from ..profiles.platform.resolve import Resolved
    from ..profiles.record.result import Result
    from .answers import RunAnswer

Graphs = Literal["graph", "node"]


def profile(
    scenario: arguments.Name,
    tool: Annotated[
        Literal["nsys", "torch"], typer.Option(help="Nsight Systems, or torch.profiler.")
    ] = "nsys",
    overrides: arguments.Overrides = (),
    relay: arguments.Relay = None,
    device: arguments.Device = "auto",
    graph_trace: Annotated[
        Graphs, typer.Option(help="Replayed CUDA graphs kernel by kernel (node), or whole: cheaper (graph).")
    ] = "node",
    nsys: arguments.Tool = None,
    output_dir: Annotated[Path, typer.Option(help="Keep the capture and its result.json here.")] = Path(
        "capture"
    ),
) -> RunAnswer:
    """Run a scenario once under a profiler and report the capture. Its times include the profiler's overhead: compare
    them with each other only.

    Without a GPU Nsight Systems still records the scheduler's ranges, in wall-clock time on the virtual GPU.

    Exit codes: 0 done; 2 usage or scenario; 3 no such tool here, or it recorded nothing; 4 the run failed;
    130 interrupted, or 143 terminated.
    """
    from .answers import RunAnswer

    question = arguments.resolved(scenario, overrides, relay=relay)
    arguments.make_output_dir(output_dir)
    if tool == "torch":
        result = _with_torch(question, output_dir, device)
    else:
        words = [str(scenario), *(f"--set={text}" for text in arguments.with_relay(relay, overrides))]
        result = _with_nsys(question, words, output_dir, device=device, graphs=graph_trace, nsys=nsys)
    return RunAnswer(result, exit_code=INTERRUPTED if result.run.cancelled else 0).kept(output_dir)


def _with_torch(question: Resolved, output_dir: Path, device: arguments.Device) -> Result:
    """Runs the two passes of a run on CUDA, and keeps the trace of the second one."""
    from ..profiles.platform.machine import MachineError
    from ..profiles.ranks.execute import Options, execute
    from ..profiles.record.recording import FILE, TimelineRecording
    from ..profiles.run.machines import device_kind

    if device_kind("cuda" if device == "auto" else device, question.scenario) != "cuda":
        raise MachineError(
            "torch.profiler sees nothing of the virtual GPU: run it as it is, and draw it with trace"
        )
    kept = output_dir / "capture.json.gz"
    options = Options(device="cuda", command=arguments.command_line(), keep_trace=kept)
    with TimelineRecording(output_dir / FILE) as recording:
        result = execute(question, options, extra_sinks=[recording])
    echo(f"{kept}: the counting pass, for ui.perfetto.dev", err=True)
    return result


def _with_nsys(
    question: Resolved,
    words: list[str],
    output_dir: Path,
    *,
    device: arguments.Device,
    graphs: Graphs,
    nsys: str | None,
) -> Result:
    from ..profiles.captures.nsys.record import RecordingRequest, find, recorded
    from ..profiles.run.machines import device_kind

    tool = find(nsys, os.environ)
    order = RecordingRequest(words, device_kind(device, question.scenario), graphs)
    clock = arguments.Stopwatch()
    result, report = recorded(tool, order, output_dir, os.environ)
    if order.device == "vgpu":
        echo("on the virtual GPU Nsight Systems sees the ranges only; their times are wall-clock", err=True)
    echo(
        f"{report}: opens in nsys-ui; nsys writes the environment of all processes of this machine into it\n"
        f"{report.with_suffix('.sqlite')}: scrubbed of that; report, compare and trace read it",
        err=True,
    )
    run = result.run.model_copy(update={**clock.run(), "wall_s": result.run.wall_s})
    return result.model_copy(update={"run": run})
