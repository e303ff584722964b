"""The first token in which two runs of one workload differ."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from ...sched.observe import Observer, StepInfo
from ..record.result import Abstained, Result

if TYPE_CHECKING:
    from ...sched.request import Request

Steps = Mapping[str, Sequence[int]]


class Divergence(NamedTuple):
    """The first difference. ``position`` counts output tokens from 0; a token is None where that side had ended.
    Steps count from the workload's first; they are None where a side did not keep them. ``request`` is None where
    the digests differ and the tokens were not kept, or are the same and damaged KV made the difference."""

    seed: int
    request: str | None = None
    position: int | None = None
    token_a: int | None = None
    token_b: int | None = None
    step_a: int | None = None
    step_b: int | None = None
    margin_a: float | None = None  # of the best score over the second at that token; None where not computed
    margin_b: float | None = None


class TokenSteps(Observer):
    """Observes which step made each token."""

    def __init__(self) -> None:
        self.steps: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        self._new: list[tuple[str, int]] = []
        self._first: int | None = None

    def launched(self, info: StepInfo) -> None:
        if self._first is None:
            self._first = info.step

    def tokens(self, requests: Sequence[Request], count: int) -> None:
        self._new += [(request.id, count) for request in requests]

    def settled(self, info: StepInfo) -> None:
        step = info.step - (self._first or 0)
        for request, count in self._new:
            self.steps[request].extend([step] * count)
        self._new.clear()


def comparable(a: Result, b: Result) -> bool:
    """Whether both results have meaningful tokens."""
    return not (isinstance(a.outputs, Abstained) or isinstance(b.outputs, Abstained))


def same_tokens(a: Result, b: Result) -> bool:
    return comparable(a, b) and a.outputs == b.outputs


def first_divergence(
    a: Result, b: Result, *, seed: int, steps_a: Steps | None = None, steps_b: Steps | None = None
) -> Divergence | None:
    """The earliest difference in time, or in request order where steps are unknown; None where digests agree."""
    if same_tokens(a, b):
        return None
    found = [
        Divergence(
            seed,
            request,
            position,
            token_a,
            token_b,
            _step(steps_a, request, position),
            _step(steps_b, request, position),
        )
        for request, position, token_a, token_b in token_differences(a, b)
    ]
    return min(found, key=_when, default=Divergence(seed))


def _when(divergence: Divergence) -> float:
    steps = [step for step in (divergence.step_a, divergence.step_b) if step is not None]
    return min(steps, default=float("inf"))


def token_differences(a: Result, b: Result) -> Iterator[tuple[str, int, int | None, int | None]]:
    """The first differing position of each request whose tokens were kept and differ."""
    tokens_b = {row.id: row.token_ids or () for row in b.requests}
    for row in a.requests:
        pairs = zip_longest(row.token_ids or (), tokens_b.get(row.id, ()))
        for position, (x, y) in enumerate(pairs):
            if x != y:
                yield row.id, position, x, y
                break


def _step(steps: Steps | None, request: str, position: int) -> int | None:
    known = steps.get(request, ()) if steps else ()
    return known[position] if position < len(known) else None
