"""``schedbench onebatch``: the latency of a prefill and of a decode of one static batch, without the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import Device, Faults, Form, Name, Overrides, Relay, Stopwatch, make_output_dir, resolved
from .errors import UsageError

if TYPE_CHECKING:
    from ..profiles.platform.resolve import Resolved
    from ..profiles.run.one_batch import BatchShape

_LIST = "N1,N2"


def onebatch(
    scenario: Name,
    batch: Annotated[str, typer.Option(metavar=_LIST, help="Requests of a batch.")] = "1,8",
    prompt: Annotated[str, typer.Option(metavar=_LIST, help="Prompt tokens of each request.")] = "128,1024",
    output: Annotated[int, typer.Option(min=1, help="Output tokens of each request.")] = 16,
    overrides: Overrides = None,
    relay: Relay = None,
    fault: Faults = None,
    device: Device = "auto",
    output_dir: Annotated[Path | None, typer.Option(help="Keep onebatch.json here.")] = None,
    form: Form = "table",
) -> None:
    """Prefill and decode batches of a scenario's model without its scheduler, and print the latency of both steps
    against batch and prompt length.

    Exit codes: 0 done; 2 usage, or no batch fits; 3 this machine cannot; 4 a batch failed.
    """
    shapes = _shapes(_numbers("--batch", batch), _numbers("--prompt", prompt), output)
    question = _question(scenario, overrides, relay, fault)
    make_output_dir(output_dir)
    from ..profiles.run.one_batch import document
    from .answers import BatchesAnswer
    from .console import status

    clock = Stopwatch()
    with status("batches") as notice:
        content = document(question, shapes, device, notice)
    answer = BatchesAnswer(content | {"run": clock.run()})
    answer.keep(output_dir, "onebatch.json")
    answer.show(form)
    if not answer.passed:
        raise UsageError(f"no batch fits: {content['points'][0]['refused']}")


def _question(
    name: str, overrides: list[str] | None, relay: str | None, faults: list[str] | None
) -> Resolved:
    question = resolved(name, overrides, relay=relay)
    if len(question.relays) > 1:
        raise UsageError("engine.relays: expected one relay")
    from ..profiles.check.faults import with_faults

    return with_faults(question, faults or (), onebatch=True)


def _shapes(batches: list[int], prompts: list[int], output: int) -> list[BatchShape]:
    from ..profiles.run.one_batch import BatchShape

    return [BatchShape(batch, prompt, output) for prompt in prompts for batch in batches]


def _numbers(option: str, text: str) -> list[int]:
    """Raises UsageError."""
    found = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if not all(found):
        raise UsageError(f"{option}: expected numbers from 1 on, e.g. 1,8, got {text!r}")
    return found
