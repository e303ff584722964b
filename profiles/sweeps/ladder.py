"""Several relays on one scenario: a rung for each relay, and the differences between neighbouring rungs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from typing import Any

from pydantic_core import to_jsonable_python

from ...scenarios.combinations import overlaps
from ...scenarios.workload import penalised
from ...sched.relay.choice import RelayChoice, difference
from ...sched.relay.row import DraftRow, RelayRow, Speculation
from ..judge.effects import LineEffect
from ..judge.local import measured_times, unrepeatable
from ..platform.pool import require_alone, spread
from ..platform.resolve import Resolved, speculation
from ..ranks.execute import Options, execute
from ..record.provenance import ScenarioPart
from ..record.result import SCHEMA_VERSION, Outputs, Result
from ..run.runner import ObserverFactory, unobserved
from .conclusion import ladder_conclusion

Document = dict[str, Any]


def tokens_agree(question: Resolved, rungs: Sequence[Result]) -> bool:
    """Whether rungs with the same rule for penalties have the same tokens. Where the workload penalises, upstream's
    rule gives other tokens than the exact one."""
    by_rule = penalised(question.scenario)
    promised = {
        (
            rung.relay.switches["penalties"] if by_rule else "",
            rung.outputs.digest if isinstance(rung.outputs, Outputs) else None,
        )
        for rung in rungs
    }
    return len({rule for rule, _ in promised}) == len(promised)


def document(
    question: Resolved,
    scenario: ScenarioPart,
    rungs: Sequence[Result],
    lines: Sequence[Sequence[LineEffect]] = (),
) -> Document:
    """``scenario`` is as in a result document. ``rungs`` are in the order of the relays; some are missing when the run
    was interrupted. ``lines``: in which each rung differs from the one before it, where their worth was computed."""
    overlap, mode = overlaps(question.scenario), speculation(question.scenario)
    rows = [_rows(relay, overlap, mode) for relay in question.relays]
    changes = [{}, *map(_apart, rows, rows[1:])]  # of the policies of the rung before
    content = {
        "schema_version": SCHEMA_VERSION,
        "scenario": scenario,
        "ladder": {"tokens_agree": tokens_agree(question, rungs)},
        "rungs": [
            {
                "known_hazards": list(relay.known_hazards(overlap=overlap, speculation=mode)),
                "changes": changed,
                "result": rung.document(),
                "lines": [line._asdict() for line in asked],
            }
            for relay, rung, changed, asked in zip(
                question.relays, rungs, changes, lines or repeat(()), strict=False
            )
        ],
    }
    plain: Document = to_jsonable_python(content)
    return plain | {"conclusion": ladder_conclusion(plain)}


def _rows(relay: RelayChoice, overlap: bool, mode: Speculation | None) -> dict[str, RelayRow | DraftRow]:
    """The rows of the relay, by the prefix of their questions."""
    drafts = relay.draft_row(mode)
    row = relay.row(overlap=overlap, speculation=mode)
    return {"": row} if drafts is None else {"": row, f"{mode}.": drafts}


def _apart(
    before: dict[str, RelayRow | DraftRow], after: dict[str, RelayRow | DraftRow]
) -> dict[str, tuple[str, str]]:
    """The questions for which the policies differ, with both."""
    return {
        f"{prefix}{question}": names
        for prefix, row in after.items()
        for question, names in difference(before[prefix], row).items()
    }


def climb(resolved: Resolved, options: Options, *, observe: ObserverFactory = unobserved) -> list[Result]:
    """Run the scenario with each of its relays: the first observed, and the others side by side where that saves time
    and no time is measured. Where the user interrupts runs in other processes, those before them are kept, the last of
    them with ``run.further_cancelled``. Raises as ``execute`` does, WorkersError."""
    require_alone(measured_times(resolved.scenario, options.device))
    first, *rest = map(resolved.with_relay, resolved.relays)
    found = [execute(first, options, observe=observe)]
    if not found[0].run.cancelled:
        alone = bool(unrepeatable(first, options))
        try:
            with nullcontext(map) if alone else spread(len(rest), found[0].run.wall_s) as each:
                for result in each(partial(execute, options=options), rest):
                    found.append(result)
                    if result.run.cancelled:
                        break
        except KeyboardInterrupt:
            part = found[-1].run.model_copy(update={"further_cancelled": True})
            found[-1] = found[-1].model_copy(update={"run": part})
    return found
