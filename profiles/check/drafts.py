"""Compares drafts with those of a reference run: a wrong draft costs acceptance but no token, so tokens do not show it.

Without prompt chunks and without prefixes of other requests, what a draft starts from follows bit for bit from the
request's own tokens. Both runs go without them, and so they also make the same verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from ...sched.relay.choice import choose
from ..judge.effects import value_of
from ..platform.resolve import Resolved, speculation
from ..ranks.execute import Options
from ..run.crash import Crash
from .draft_invariants import DraftStart
from .invariants import Invariants
from .report import Check, Evidence, skipped, verdict
from .runs import attempt, with_section
from .tokens import promised

NAME = "drafts"


class DraftStarts(NamedTuple):
    """What drafts started from, one entry per verify, by request that finished and was never retracted."""

    starts: dict[str, Sequence[DraftStart]]
    accept_length: float


def reference_drafts(resolved: Resolved) -> DraftStarts | Crash:
    """The drafts of the same scenario in the serial loop of ``latest``, and for chains by the other worker."""
    return _drafted(_by_another_worker(resolved).with_relay(choose("latest", {})))


def check_drafts(resolved: Resolved, reference: Callable[[], DraftStarts | Crash]) -> Check:
    """``reference`` returns ``reference_drafts``."""
    why = _why_not(resolved)
    if why:
        return skipped(NAME, why)
    expected, found = reference(), _drafted(resolved)
    for name, run in (("the reference", expected), ("the run without chunks", found)):
        if isinstance(run, Crash):
            return Check(NAME, "failed", f"{name} crashed", (Evidence(str(run)),))
    assert isinstance(expected, DraftStarts) and isinstance(found, DraftStarts)
    both = expected.starts.keys() & found.starts.keys()
    if not both:
        return skipped(NAME, "every request was retracted, or did not finish")
    apart = (text for name in sorted(both) for text in islice(_differences(name, found, expected), 1))
    evidence = list(map(Evidence, apart))
    if evidence and found.accept_length != expected.accept_length:
        lengths = f"{found.accept_length:.3f} tokens accepted per verify, {expected.accept_length:.3f} there"
        evidence.append(Evidence(lengths))
    worker = speculation(_by_another_worker(resolved).scenario)
    by = f"{worker} in the serial loop of latest, prompts whole and without cache"
    return verdict(NAME, evidence, about=f"they start as by {by}, bit for bit; requests: {len(both)}")


def _why_not(resolved: Resolved) -> str:
    spec = resolved.scenario.engine.speculative
    if spec.acceptance != "measured":
        return "acceptance was simulated"
    if not promised(resolved):
        return (
            "upstream's penalties lag under speculation: equal tokens are not promised, so neither are drafts"
        )
    return ""


def _differences(name: str, found: DraftStarts, expected: DraftStarts) -> Iterator[str]:
    """Differences of a request's drafts. Verifies that were launched before its end was known are not compared."""
    own, meant = found.starts[name], expected.starts[name]
    for number, (start, other) in enumerate(zip(own, meant, strict=False)):
        where = f"request {name}, verify {number}"
        if start.length != other.length:
            yield f"{where} starts at length {start.length} instead of {other.length}"
        elif parts := start.differing(other):
            yield f"{where}, length {start.length}: its draft starts from other {', '.join(parts)}"
    if len(own) < len(meant):
        yield f"request {name} was verified {len(own)} times instead of {len(meant)}"


def _drafted(resolved: Resolved) -> DraftStarts | Crash:
    guard = Invariants()
    whole = with_section(resolved, "engine", chunked_prefill_size=None, radix_cache=False)
    result = attempt(whole, Options(device="vgpu", counted=False), guard)
    if isinstance(result, Crash):
        return result
    finished = {row.id for row in result.requests if row.status == "finished"}
    starts = {name: starts for name, starts in guard.starts.items() if name in finished}
    return DraftStarts(starts, value_of(result, "accept_length") or 0.0)


def _by_another_worker(resolved: Resolved) -> Resolved:
    spec = resolved.scenario.engine.speculative
    other: Literal["v1", "v2"] = "v1" if spec.mode == "v2" or spec.topk > 1 else "v2"
    return with_section(
        resolved, "engine", overlap=False, speculative=spec.model_copy(update={"mode": other})
    )
