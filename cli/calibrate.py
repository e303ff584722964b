"""``schedbench calibrate``: a hardware profile fitted to this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .errors import INTERRUPTED, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..profiles.calibrate.host import Errand


def calibrate(
    host_only: Annotated[
        bool, typer.Option("--host-only", help="The scheduler's own phases alone: needs no GPU.")
    ] = False,
    base: Annotated[
        str, typer.Option(help="The profile whose other constants are kept: a shipped one, or a file.")
    ] = "h200",
    output: Annotated[Path | None, typer.Option(help="Write the profile here, for device.hardware.")] = None,
    batch_sizes: Annotated[str, typer.Option(help="Running requests to measure at.")] = "1,4,16,64",
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of prompts to measure at.")] = "32,256,1024",
    rounds: Annotated[int, typer.Option(min=1, help="How often each of them is run.")] = 2,
    judge: Annotated[
        bool,
        typer.Option(
            "--judge",
            help="Run some scenarios with these lines and with this machine's own host: how far apart?",
        ),
    ] = False,
    form: Annotated[Literal["table", "json"], typer.Option("--format", help="A table, or JSON.")] = "table",
) -> None:
    """Measure what this machine takes, and write it as a hardware profile: each constant with its origin.

    A host phase is fitted as a + b * n over batch sizes and prompt lengths, without the device calls inside it. On
    CUDA launches, events, copies and kernels are measured too. What is not measured stays as the base has it.

    Exit codes: 0 done; 2 usage or profile; 3 no CUDA here, and not --host-only; 130 interrupted.
    """
    from ..profiles.calibrate import calibration
    from ..profiles.platform.hardware import load

    plan = _plan(batch_sizes, prompt_tokens)
    hardware = load(base)
    if not host_only:
        calibration.require_cuda()
    try:
        found = calibration.calibrate(
            hardware,
            plan,
            name=base if output is None else output.stem,
            rounds=rounds,
            host_only=host_only,
            tell=_tell,
        )
        document = found.document()
        if judge:
            document["judged"] = _judged(document)
    except KeyboardInterrupt:
        typer.echo("schedbench: interrupted; nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if output is not None:
        _write(output, found.profile)
    if form == "json":
        typer.echo(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        from .console import results

        render(document, results())


def _tell(words: str) -> None:
    typer.echo(words, err=True)


def _judged(document: dict[str, Any]) -> dict[str, Any]:
    from ..profiles.calibrate import accuracy
    from ..profiles.judge import prediction

    hardware = accuracy.of_this_machine(document["profile"], document["through_torch_ns"])
    return prediction.document(accuracy.judged(hardware, accuracy.ASKED, tell=_tell))


def _plan(batch_sizes: str, prompt_tokens: str) -> list[Errand]:
    from ..profiles.calibrate.host import errands

    return errands(_numbers("--batch-sizes", batch_sizes), _numbers("--prompt-tokens", prompt_tokens))


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"{option}: expected positive numbers with commas between, got {text!r}")
    return sorted({int(word) for word in words})


def _write(path: Path, profile: dict[str, Any]) -> None:
    from ..profiles.calibrate.profile import to_yaml
    from ..profiles.record.files import write_whole

    write_whole(path, to_yaml(profile))
    typer.echo(f"{path}: --set device.hardware={path}", err=True)


def render(document: dict[str, Any], console: Console) -> None:
    """Phases, what was measured of the device, and what could not be."""
    console.print(_phases(document))
    if document["device"]:
        console.print()
        console.print(_device(document))
    if "judged" in document:
        console.print()
        console.print(_errors(document["judged"]))
    for line in document["missing"]:
        console.print(f"as in {document['base']}: {line}", markup=False)


def _phases(document: dict[str, Any]) -> Table:
    from .frames import framed
    from .numbers import MISSING, number, whole

    left_out = (
        f"left out: {document['through_torch_ns']:.0f} ns per device call, torch's way to it; "
        f"in no phase: {document['outside_us_per_step']:.1f} us per step\n"
        "worst: a size's median over the line there, where a prompt of that size takes longer than a decode"
    )
    table = framed(
        f"host phases, a + b * n, ns · {document['machine']} · {document['date']}", caption=left_out
    )
    table.add_column("phase", no_wrap=True)
    for heading in ("a", "b", "samples", "sizes", "residual", "R2", "worst", "at n", "old a", "old b"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, line in _lines(document["phases"]):
        old = line.get("old") or {"a": None, "b": None}
        r2 = MISSING if line["r2"] is None else f"{line['r2']:.2f}"
        table.add_row(
            name, number(line["a"]), number(line["b"]), number(line["samples"]), number(line["sizes"]),
            number(line["residual"]), r2, f"x {number(line['worst'])}", number(whole(line["worst_n"])),
            number(old["a"]), number(old["b"]),
        )  # fmt: skip
    return table


def _lines(phases: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each phase, and the kinds of steps for which it is another."""
    for name, line in phases.items():
        yield name, line
        yield from ((f"  {kind}", of_kind) for kind, of_kind in line.get("kinds", {}).items())


def _errors(judged: dict[str, Any]) -> Table:
    from .frames import framed
    from .numbers import number, percent

    signs = judged["signs"]
    table = framed(
        "declared host times against this machine's, on one virtual device",
        caption=f"median error {percent(judged['median_error'])} %; of changes that both call "
        f"{signs['agree']} signs agree and {signs['differ']} differ",
    )
    for heading in ("scenario", "state", "metric", "unit"):
        table.add_column(heading, no_wrap=True)
    for heading in ("declared", "measured", "error %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in judged["errors"]:
        table.add_row(
            *(row[name] for name in ("scenario", "state", "metric", "unit")),
            *(number(row[name]) for name in ("emulated", "measured")),
            percent(row["error"]),
        )
    return table


def _device(document: dict[str, Any]) -> Table:
    from .frames import framed
    from .numbers import number

    table = framed("device")
    table.add_column("constant", no_wrap=True)
    for heading in ("value", "old"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("from")
    for row in document["device"]:
        table.add_row(row["key"], number(row["value"]), number(row["old"]), row["basis"])
    return table
