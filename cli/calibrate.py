"""``schedbench calibrate``: a hardware profile fitted to this machine."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .arguments import Form
from .errors import INTERRUPTED, UsageError
from .text import echo


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
    judge: Annotated[
        bool,
        typer.Option(
            "--judge",
            help="Compare runs with these host times with runs on this machine's own host.",
        ),
    ] = False,
    form: Form = "table",
) -> None:
    """Measure the host times of this machine, and write a hardware profile: each constant with its origin.

    A host phase is fitted as a + b * n over batch sizes and prompt lengths, without the device calls inside it. On
    CUDA launches, events, copies and kernels are measured too. Constants that are not measured stay as in the base.

    Exit codes: 0 done; 2 usage or profile; 3 no CUDA here, and not --host-only; 130 interrupted.
    """
    from ..profiles.calibrate import calibration
    from ..profiles.calibrate.host import calibration_runs
    from ..profiles.platform.hardware import load
    from . import calibrate_page
    from .page import show

    plan = calibration_runs(
        _numbers("--batch-sizes", batch_sizes), _numbers("--prompt-tokens", prompt_tokens)
    )
    hardware = load(base)
    if not host_only:
        calibration.require_cuda()
    try:
        probes = None if host_only else calibration.probed(_report)
        name = base if output is None else output.stem
        found = calibration.calibrate(hardware, plan, probes, name=name, rounds=rounds, notify=_report)
        document = found.document()
        if judge:
            document["judged"] = _judged(document)
        document["conclusion"] = calibration.conclusion(document)
    except KeyboardInterrupt:
        echo("schedbench: interrupted; nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if output is not None:
        _write(output, found.profile)
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    show(form, lambda _: calibrate_page.page(document), json=lambda: text)


_report = partial(echo, err=True)


def _judged(document: dict[str, Any]) -> dict[str, Any]:
    from ..profiles.calibrate import calibration

    hardware = calibration.machine_profile(document["profile"], document["through_torch_ns"])
    return calibration.host_accuracy(hardware, calibration.CASES, notify=_report)


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"{option}: expected positive numbers with commas between, got {text!r}")
    return sorted({int(word) for word in words})


def _write(path: Path, profile: dict[str, Any]) -> None:
    from ..profiles.calibrate.calibration import to_yaml
    from ..profiles.record.files import write_whole

    write_whole(path, to_yaml(profile))
    echo(f"{path}: --set device.hardware={path}", err=True)
