"""``schedbench onebatch``: the latency of a prefill and of a decode of one static batch, without the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ..profiles.record.conclusion import numbers
from . import arguments
from .errors import USAGE, UsageError
from .text import MISSING, number

if TYPE_CHECKING:
    from .answers import BatchesAnswer
    from .page import Document, Page

_LIST: Final = "N1,N2"
_COLUMNS: Final = ("batch", "prompt", "output")
_FIGURES: Final = {  # heading by field
    "prefill_ms": ">prefill\nms",
    "prefill_throughput": ">prompt\ntokens/s",
    "decode_ms": ">decode\nms",
    "decode_throughput": ">output\ntokens/s",
    "total_ms": ">total\nms",
    "throughput": ">all\ntokens/s",
}


def onebatch(
    scenario: arguments.Name,
    *,
    batch: Annotated[str, typer.Option(metavar=_LIST, help="Requests of a batch.")] = "1,8",
    prompt: Annotated[str, typer.Option(metavar=_LIST, help="Prompt tokens of each request.")] = "128,1024",
    output: Annotated[int, typer.Option(min=1, help="Output tokens of each request.")] = 16,
    overrides: arguments.Overrides = (),
    relay: arguments.Relay = None,
    faults: arguments.Faults = (),
    device: arguments.Device = "auto",
    output_dir: Annotated[Path | None, typer.Option(help="Keep onebatch.json here.")] = None,
    **keys: arguments.Value,
) -> BatchesAnswer:
    """Prefill and decode batches of a scenario's model without its scheduler, and print the latency of both steps
    against batch and prompt length.

    Exit codes: 0 done; 2 usage, or no batch fits; 3 this machine cannot; 4 a batch failed; 130 interrupted,
    or 143 terminated.
    """
    batches, prompts = arguments.numbers("--batch", batch), arguments.numbers("--prompt", prompt)
    question = arguments.resolved(scenario, [*overrides, *arguments.settings(keys)], relay=relay)
    if len(question.relays) > 1:
        raise UsageError("engine.relays: expected one relay")
    from ..profiles.check.faults import with_faults

    question = with_faults(question, faults, onebatch=True)
    arguments.make_output_dir(output_dir)
    from ..profiles.run.one_batch import BatchShape, document
    from .answers import BatchesAnswer
    from .console import status

    clock = arguments.Stopwatch()
    shapes = [BatchShape(batch, prompt, output) for prompt in prompts for batch in batches]
    with status("batches") as notice:
        content = document(question, shapes, device, notice)
    refused = [point["refused"] for point in content["points"]]
    failed = [f"schedbench: no batch fits: {refused[0]}"] * all(refused)
    content["run"] = clock.run()
    return BatchesAnswer(content, remarks=failed, exit_code=USAGE if failed else 0).kept(output_dir)


def page(document: Document, width: int, *, few: bool = False) -> Page:  # noqa: ARG001
    """Latency and throughput of both steps against batch and prompt length."""
    from rich.text import Text

    from .page import Page, framed

    table = framed(
        "one static batch, without the scheduler", *(f">{name}" for name in _COLUMNS), *_FIGURES.values()
    )
    for point in document["points"]:
        table.add_row(*(number(point[name]) for name in (*_COLUMNS, *_FIGURES)))
    refused = dict.fromkeys(
        f"{MISSING} {point['batch']} x {point['prompt']}: {point['refused']}"
        for point in document["points"]
        if point["refused"]
    )
    return Page(
        f"onebatch {document['scenario']['expanded']['name']}",
        [Text(_setting(document)), table, *map(Text, refused)],
        document["conclusion"],
        footer=(f"`{document['run']['command']}`",),
    )


def _setting(document: Document) -> str:
    """What kind of numbers these are."""
    labels, relay = document["labels"], document["relay"]
    kind = "no run" if labels is None else numbers(labels, document["hardware"]["name"])
    name = document["scenario"]["expanded"]["name"]
    faults = [f"fault {fault}" for fault in relay["faults"]]
    return " · ".join([name, kind, f"relay {relay['state']}", *faults, "decode: the median step"])


def as_csv(document: Document) -> str:
    """One row per batch."""
    from .page import to_csv

    fields = [*_COLUMNS, *_FIGURES, "digest", "refused"]
    label = document["labels"] and numbers(document["labels"])
    return to_csv([*fields, "label"], ([*map(point.get, fields), label] for point in document["points"]))
