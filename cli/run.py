"""``schedbench run``: one scenario, one document, one set of tables. Knows no measuring."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .errors import GATE_FAILED, INTERRUPTED, WORKLOAD_FAILED, UsageError
from .question import asked, folder
from .stopwatch import command_line

if TYPE_CHECKING:
    from ..profiles.platform.resolve import Resolved
    from ..profiles.ranks.execute import Options, RunOutcome
    from ..profiles.record.result import Result
    from ..sched.observe import Clock
    from .progress import RunProgress

Device = Literal["auto", "cuda", "vgpu"]
Format = Literal["table", "json", "md", "csv", "html"]
Switch = Literal["on", "off"]
World = Literal["virtual", "distributed"]

_SEVERAL = "see engine.pipeline, engine.disaggregation, engine.data_parallel, engine.replicas"


def run(
    scenario: Annotated[str, typer.Argument(help="A scenario file, or the name of a shipped one.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override any key, e.g. engine.overlap=false."),
    ] = None,
    device: Annotated[Device, typer.Option(help="auto takes CUDA where there is one.")] = "auto",
    relay: Annotated[str | None, typer.Option(help="A relay state instead of the scenario's.")] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Break the relay as upstream had it broken; see list faults."),
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(metavar="BUDGET", help="A budget, e.g. decode.steady.schedule.sync=0."),
    ] = None,
    save_tokens: Annotated[
        bool, typer.Option("--save-tokens", help="Keep every request's tokens in the result.")
    ] = False,
    hazards: Annotated[
        Switch, typer.Option(help="Watch for accesses that nothing orders; on CUDA instead of measuring.")
    ] = "off",
    adversarial: Annotated[
        int | None,
        typer.Option(metavar="SEED", min=0, help="Do all work as late as streams allow; see check."),
    ] = None,
    world: Annotated[
        World,
        typer.Option(help="Of several ranks: threads of this process, or processes of torch.distributed."),
    ] = "virtual",
    output_dir: Annotated[
        Path | None, typer.Option(help="Keep result.json here, and the timeline for trace.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="What to print on stdout.")] = "table",
) -> None:
    """Run one scenario and print what it cost; with engine.relays, once for each of them, as one table.

    Exit codes: 0 done; 1 a budget was broken, or a hazard was found that the relay does not declare;
    2 usage or scenario; 3 this machine cannot; 4 the workload failed; 130 interrupted, or 143
    terminated, what there is was kept.
    """
    question = asked(scenario, overrides or [], relay=relay, expect=expect or [], faults=fault or [])
    if world == "distributed" and question.scenario.engine.ranks == 1:
        raise UsageError(f"--world: distributed takes several ranks, and the scenario has one: {_SEVERAL}")
    if world == "virtual":
        _alone()
    options = _options(device, hazards, adversarial, world, save_tokens=save_tokens)
    folder(output_dir)
    try:
        if len(question.relays) > 1:
            raise typer.Exit(_climb(question, options, output_dir, form))
        outcome = _execute(question, options, output_dir)
    except KeyboardInterrupt:
        typer.echo("schedbench: interrupted before anything was measured", err=True)
        raise typer.Exit(INTERRUPTED) from None
    _show(outcome, form)
    if output_dir is not None:
        outcome.result.write(output_dir / "result.json")
    raise typer.Exit(_exit_code(outcome))


def _alone() -> None:
    """Raises UsageError where torchrun started this process and others, which would all run the same."""
    from ..profiles.ranks.processes import launched

    place = launched()
    if place is not None and place.size > 1:
        raise UsageError(
            f"--world: this process is one of {place.size} that torchrun started; --world distributed makes them ranks"
        )


def _options(
    device: Device, hazards: Switch, adversary: int | None, world: World, *, save_tokens: bool
) -> Options:
    if hazards == "on" and adversary is not None:
        raise UsageError("--hazards follows values in program order: leave out --adversarial, or use check")
    from ..profiles.ranks.execute import Options

    return Options(
        device=device,
        save_tokens=save_tokens,
        command=command_line(),
        hazards=hazards == "on",
        adversary=adversary,
        world=world,
    )


def _watch(clock: Clock, total: int) -> RunProgress:
    from .console import progress
    from .progress import RunProgress

    return RunProgress(progress(), total=total, clock=clock)


def _execute(resolved: Resolved, options: Options, output_dir: Path | None) -> RunOutcome:
    from dataclasses import replace

    from ..profiles.ranks.execute import execute

    return execute(resolved, resolved.relays[0], replace(options, record=output_dir), watch=_watch)


def _climb(resolved: Resolved, options: Options, output_dir: Path | None, form: Format) -> int:
    """Every relay of the scenario; the worst exit code of all."""
    from ..profiles.record.files import write_whole
    from ..profiles.sweeps.ladder import climb
    from . import ladder
    from .console import results

    found = climb(resolved, options, watch=_watch)
    if output_dir is not None:
        write_whole(output_dir / "ladder.json", found.to_json())
    if form == "table":
        ladder.render(found.document(), results())
    else:
        forms = {"md": ladder.markdown, "csv": ladder.to_csv, "html": ladder.html}
        sys.stdout.write(found.to_json() if form == "json" else forms[form](found.document()))
    codes = [_exit_code(rung.outcome) for rung in found.rungs]
    return max(*codes, 0 if found.tokens_agree else GATE_FAILED)


def _show(outcome: RunOutcome, form: Format) -> None:
    from .console import results
    from .render import show

    show(outcome, results(), form)
    for line in (*_unfinished(outcome.result), *_broken_off(outcome.result)):
        typer.echo(line, err=True)


def _unfinished(result: Result) -> list[str]:
    """Why requests did not finish, the most frequent reason first."""
    reasons = Counter(
        (row.status, row.reason) for row in result.requests if row.status in ("refused", "failed")
    )
    return [f"{count} {status}: {reason}" for (status, reason), count in reasons.most_common(3)]


def _broken_off(result: Result) -> list[str]:
    """Which ranks were lost, and what of the script of failures the run did not come to."""
    missed = [f"never came: {fault}" for fault in result.run.missed]
    return [f"broke off: {result.run.failure}", *missed] if result.run.failure else missed


def _exit_code(outcome: RunOutcome) -> int:
    result = outcome.result
    if result.run.cancelled:
        return INTERRUPTED
    if result.run.failure or _went_nowhere(result) or _failed_by_script(result):
        return WORKLOAD_FAILED
    return GATE_FAILED if outcome.breaches or outcome.undeclared else 0


def _went_nowhere(result: Result) -> bool:
    return bool(result.requests) and not any(r.status in ("finished", "aborted") for r in result.requests)


def _failed_by_script(result: Result) -> bool:
    return bool(result.scenario.expanded.get("faults")) and any(r.status == "failed" for r in result.requests)
