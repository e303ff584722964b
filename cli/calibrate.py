"""``schedbench calibrate``: a hardware profile fitted to this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import UndrawnForm, numbers
from .errors import UsageError
from .text import echo, number, whole

if TYPE_CHECKING:
    from rich.table import Table

    from .page import Document, Page


def calibrate(
    host_only: Annotated[
        bool, typer.Option("--host-only", help="Only the phases of the scheduler, which need no GPU.")
    ] = False,
    base: Annotated[
        str, typer.Option(help="The profile that supplies all other constants: a shipped one, or a file.")
    ] = "h200",
    output: Annotated[Path | None, typer.Option(help="Write the profile here, for device.hardware.")] = None,
    batch_sizes: Annotated[str, typer.Option(help="Numbers of running requests to measure.")] = "1,4,16,64",
    prompt_tokens: Annotated[str, typer.Option(help="Prompt lengths to measure.")] = "32,256,1024",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each of them.")] = 2,
    form: UndrawnForm = "table",
) -> None:
    """Measure the host times of this machine, and write a hardware profile: each constant with its origin.

    A host phase is fitted as a + b * n over batch sizes and prompt lengths, without the device calls inside it. On
    CUDA launches, events, copies and kernels are measured too. Constants that are not measured stay as in the base.

    Exit codes: 0 done; 2 usage or profile; 3 no CUDA here, and not --host-only; 130 interrupted, or 143
    terminated.
    """
    from ..profiles.calibrate import calibration
    from ..profiles.calibrate.host import calibration_runs
    from ..profiles.platform.hardware import load
    from .page import show

    if output is not None and not output.parent.is_dir():
        raise UsageError(f"{output.parent}: no such folder")
    if output is not None and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise UsageError(f"--output {output}: not writable")
    batches, lengths = numbers("--batch-sizes", batch_sizes), numbers("--prompt-tokens", prompt_tokens)
    plan = calibration_runs(sorted({*batches}), sorted({*lengths}))
    hardware = load(base)
    if not host_only:
        from ..profiles.cuda.machine import require_cuda

        require_cuda(
            "its calls, copies and kernels cannot be measured; --host-only measures the scheduler's own phases alone"
        )
    probes = None if host_only else calibration.probed(_report)
    name = base if output is None else output.stem
    document = calibration.calibrate(hardware, plan, probes, name=name, rounds=rounds, notify=_report)
    document["conclusion"] = calibration.conclusion(document)
    if output is not None:
        from ..profiles.record.files import write_whole

        write_whole(output, calibration.to_yaml(document["profile"]))
        echo(f"{output}: --set device.hardware={output}", err=True)
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    show(form, lambda _: page(document), json=lambda: text)


_report = partial(echo, err=True)


def page(document: Document) -> Page:
    """Host phases and constants of the device."""
    from rich.text import Text

    from .page import Page

    missing = [Text(f"as in {document['base']}: {line}") for line in document["missing"]]
    device = [_device(document)] if document["device"] else []
    return Page("calibration", [_phases(document), *device, *missing], document["conclusion"])


def _phases(document: Document) -> Table:
    from .page import framed

    left_out = (
        f"left out: {document['through_torch_ns']:.0f} ns per device call, torch's way to it; "
        f"in no phase: {document['outside_us_per_step']:.1f} us per step\n"
        "worst: a size's median over the line there, where a prompt of that size takes longer than a decode"
    )
    title = f"host phases, a + b * n, ns · {document['machine']} · {document['date']}"
    fit = (">a", ">b", ">residual", ">worst", ">at n", ">old a", ">old b")
    table = framed(title, "phase", *fit, caption=left_out, no_wrap=True)
    for name, line in _lines(document["phases"]):
        old = line.get("old") or {"a": None, "b": None}
        table.add_row(
            name, number(line["a"]), number(line["b"]), number(line["residual"]), f"x {number(line['worst'])}",
            number(whole(line["worst_n"])), number(old["a"]), number(old["b"]),
        )  # fmt: skip
    return table


def _lines(phases: Document) -> Iterator[tuple[str, Document]]:
    """Each phase, and below it the kinds of steps that have a line of their own."""
    for name, line in phases.items():
        yield name, line
        yield from ((f"  {kind}", of_kind) for kind, of_kind in line.get("kinds", {}).items())


def _device(document: Document) -> Table:
    from .page import framed

    table = framed("device", "constant", ">value", ">old", no_wrap=True)
    table.add_column("from")
    for row in document["device"]:
        table.add_row(row["key"], number(row["value"]), number(row["old"]), row["basis"])
    return table
