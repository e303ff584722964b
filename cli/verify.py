"""``schedbench verify``: the counts of the virtual GPU beside those of a real one."""

from __future__ import annotations

import json
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from .arguments import Form, Name, Overrides, Relay, make_output_dir, resolved, with_relay
from .errors import GATE_FAILED, INTERRUPTED
from .text import echo


def verify(
    scenario: Name,
    overrides: Overrides = None,
    relay: Relay = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Keep verify.json, both results and the counts here.")
    ] = None,
    form: Form = "table",
) -> None:
    """Compare the counts of the virtual GPU with those of a real one: copies, bytes, syncs and kernels, by kind of step
    and source line. Known differences are listed with their reason.

    Unless --set says otherwise, all requests arrive at once and none ends early, so that the schedule does not depend
    on the speed of the machine.

    Exit codes: 0 the counts agree; 1 a difference without a known reason; 2 usage or scenario; 3 no CUDA here;
    4 a run failed; 130 interrupted.
    """
    from ..profiles.lab import verification as comparison
    from ..profiles.record.files import write_whole
    from . import verify_page
    from .page import show

    wanted = [*comparison.PLAIN, *(overrides or [])]
    question = resolved(scenario, wanted, relay=relay)
    comparison.require_cuda(question)
    make_output_dir(output_dir)
    settings = with_relay(relay, wanted)
    with _work_folder(output_dir) as folder:
        plan = comparison.stages(scenario, settings, Path(folder))
        try:
            found = comparison.conduct(plan, Path(folder), lambda words: echo(words, err=True))
        except KeyboardInterrupt:
            echo("schedbench: interrupted before there was anything to compare", err=True)
            raise typer.Exit(INTERRUPTED) from None
    document = comparison.document(found)
    text = json.dumps(document, indent=1) + "\n"
    if output_dir is not None:
        write_whole(output_dir / "verify.json", text)
    limit = verify_page.LINES if form == "table" else None
    show(form, lambda _: verify_page.page(document, limit=limit), json=lambda: text)
    raise typer.Exit(0 if found.agrees else GATE_FAILED)


def _work_folder(output_dir: Path | None) -> AbstractContextManager[Path | str]:
    return tempfile.TemporaryDirectory() if output_dir is None else nullcontext(output_dir)
