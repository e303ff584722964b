"""Compares tokens with those of a reference run: the serial loop of ``latest``, without prefix cache, mixed steps or
speculation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...scenarios.combinations import overlaps
from ...scenarios.schema import EngineSection, RelaySection
from ...scenarios.workload import penalised
from ...sched.loop.event_loops import ABORTED
from ...sched.relay.choice import choose
from ..judge.effects import value_of
from ..judge.likeness import other_ends, token_differences, value_differences
from ..platform.resolve import Resolved, speculation
from ..ranks.execute import Options
from ..record.conclusion import number_of
from ..record.result import Abstained, RequestRow, Result
from ..run.crash import Crash
from .report import Check, Evidence, skipped, verdict
from .runs import attempt

NAME = "tokens"
# What the reference run goes without, by keys of ``engine`` that are off by default.
_PLAIN = (
    *("relays", "mixed_chunk", "policy", "hisparse", "speculative", "disaggregation", "data_parallel"),
    *("deferred", "split_prefill", "model_runner"),
)


def check_tokens(resolved: Resolved, result: Result, reference: Result | Crash) -> Check:
    """``reference`` is the run of ``reference_question``."""
    about = f"as in {_reference_words(resolved)}"
    if isinstance(reference, Crash):
        return alike(NAME, result, reference, about)
    if resolved.scenario.faults:
        result, reference = _without_failed(result, reference)
        if not result.requests:
            return skipped(NAME, "no request was left to have any")
    reference = _aborted_alike(result, reference)
    if isinstance(result.outputs, Abstained):
        return skipped(NAME, result.outputs.abstained)
    if not promised(resolved, retracted=bool(value_of(result, "retractions"))):
        why = "lag under overlap and speculation, and begin anew after a retraction"
        return skipped(NAME, f"upstream's penalties {why}: equal tokens are not promised")
    return alike(NAME, result, reference, about)


def alike(name: str, result: Result, reference: Result | Crash, about: str) -> Check:
    """Whether the tokens of the result are those of the reference."""
    if isinstance(reference, Crash):
        return Check(name, "failed", "the reference crashed", (Evidence(str(reference)),))
    if reference.run.leak and not result.run.leak:
        return Check(name, "failed", "the reference leaks", (Evidence(reference.run.leak),))
    found = list(differences(result, reference))
    return verdict(name, found, about=f"{about}, for {number_of(len(result.requests), 'request')}")


def reference_question(resolved: Resolved) -> Resolved:
    scenario, off = resolved.scenario, EngineSection()
    changes = {"relay": RelaySection(state="latest"), "overlap": False, "radix_cache": False}
    changes |= {name: getattr(off, name) for name in _PLAIN}
    plain = {
        "engine": scenario.engine.model_copy(update=changes),
        "workload": scenario.workload.model_copy(update={"controls": ()}),
        "faults": (),
    }
    return replace(resolved, scenario=scenario.model_copy(update=plain))


def reference(question: Resolved) -> Result | Crash:
    """The run of a ``reference_question``."""
    options = Options(device="vgpu", save_tokens=True, counted=False)
    return attempt(question.with_relay(choose("latest", {})), options)


def promised(resolved: Resolved, *, retracted: bool = False) -> bool:
    """Whether this relay gives the same tokens as every other loop and mode; ``retracted``: some request was."""
    exact = resolved.relay.switches["penalties"] == "exact"
    plain = not (overlaps(resolved.scenario) or speculation(resolved.scenario) or retracted)
    return exact or plain or not penalised(resolved.scenario)


def differences(found: Result, expected: Result) -> Iterator[Evidence]:
    """One for each request with another end or other tokens; where tokens are the same, for each with other log
    probabilities."""
    entries, says = [*token_differences(found, expected)], dict(other_ends(found, expected))
    for entry in entries:
        if not _aborted_later(entry, found, expected):
            end = says.get(entry[0])
            says[entry[0]] = f"{end}; {_difference(*entry)}" if end else _difference(*entry)
    yield from map(Evidence, says.values())
    if not entries:
        yield from map(Evidence, value_differences(found, expected))


def _difference(request: str, position: int, token: int | None, meant: int | None) -> str:
    here, there = ("none" if x is None else x for x in (token, meant))
    return f"request {request}, output token {position}: {here} instead of {there}"


def _aborted_later(entry: tuple[str, int, int | None, int | None], found: Result, expected: Result) -> bool:
    """Whether the request was aborted in both runs, and had more tokens in one, which gives several at once."""
    request, _, token, meant = entry
    at_once = found.labels.engine is not None or "verify" in found.steps() | expected.steps()
    return at_once and None in (token, meant) and {request} <= _aborted(found) & _aborted(expected)


def _aborted(result: Result) -> set[str]:
    return {row.id for row in result.requests if row.status == "aborted"}


def _without_failed(found: Result, expected: Result) -> tuple[Result, Result]:
    """Both results without the requests that failed by a scripted fault."""
    failed = {row.id for row in found.requests if row.status == "failed"}

    def without(result: Result) -> Result:
        rows = tuple(row for row in result.requests if row.id not in failed)
        return result.model_copy(update={"requests": rows, "outputs": expected.outputs})

    return without(found), without(expected)


def _aborted_alike(found: Result, expected: Result) -> Result:
    """``expected`` as if all requests that a control aborted in ``found`` had ended at the same token."""
    ends = {row.id: row for row in found.requests if row.reason == ABORTED}
    if not ends:
        return expected
    rows = [_until(row, ends[row.id]) if row.id in ends else row for row in expected.requests]
    return expected.model_copy(update={"requests": tuple(rows), "outputs": found.outputs})


def _until(row: RequestRow, end: RequestRow) -> RequestRow:
    tokens = (row.token_ids or ())[: end.output_tokens]
    ended = {"status": end.status, "reason": end.reason, "output_tokens": len(tokens), "token_ids": tokens}
    return row.model_copy(update=ended)


def _reference_words(resolved: Resolved) -> str:
    engine = resolved.scenario.engine
    parts = ["cache", "mixing"]
    parts += ["controls"] if resolved.scenario.workload.controls else []
    parts += ["KV on the host"] if engine.hisparse.enabled else []
    parts += ["workers of their own"] if engine.disaggregation.mode != "none" else []
    parts += ["data-parallel ranks"] if engine.data_parallel.ranks > 1 else []
    parts += ["speculation"] if engine.speculative.algorithm != "none" else []
    plain = f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"the serial loop of latest without {plain}"
