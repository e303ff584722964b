"""Ends a run in which no request advances, so that it neither lasts nor grows for ever."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

from ...sched.observe import SLEEP, Clock, Observer, StepInfo, StepKind
from ...sched.request import Request
from .system import System

# A turn of the loop without a step may wait for a copy of some ten milliseconds, and takes some ten microseconds.
MOST_TURNS: Final = 100_000
# Every step gives a request tokens, or computes a part of its prompt, except for the last steps of a request.
MOST_STEPS: Final = 300
SHORTEST_WAIT: Final = 10_000
"""ns. A loop that waits for less polls, and its turns count."""


class NoProgressError(RuntimeError):
    """No request advances. The message says since when, and how far an unfinished request is."""


class ProgressWatch(Observer):
    """Raises NoProgressError at a turn of the loop, once MOST_TURNS turns or MOST_STEPS steps have passed in which no
    request got a token, was prefilled or ended, and the loop did not wait for an arrival or a message.

    Tokens are counted each time that so many have passed, since a hook for each token costs more than all others."""

    def __init__(self, system: System, clock: Clock) -> None:
        self._system = system
        self._clock = clock
        self._asleep_since: int | None = None
        self._turns = self._steps = 0
        self._tokens: int | None = 0  # of unfinished requests when they were counted last
        self._since = system.next_step

    range_names = ("receive", SLEEP)

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        if name == "receive":
            self._turn()
        elif name == SLEEP:
            self._asleep_since = self._clock.now()
        return super().range(name, step, size)

    def planned(self, step: int, kind: StepKind) -> None:  # noqa: ARG002
        if kind in ("prefill", "mixed"):
            self._advance()

    def launched(self, info: StepInfo) -> None:  # noqa: ARG002
        self._steps += 1

    def ended(self, request: Request) -> None:  # noqa: ARG002
        self._advance()

    def _advance(self, tokens: int | None = None) -> None:
        self._turns = self._steps = 0
        self._tokens = tokens

    def _turn(self) -> None:
        slept, self._asleep_since = self._asleep_since, None
        if slept is not None and self._clock.now() - slept >= SHORTEST_WAIT:
            self._advance()
        if not self._turns:
            self._since = self._system.next_step
        self._turns += 1
        if self._turns <= MOST_TURNS and self._steps <= MOST_STEPS:
            return
        found = self._system.unfinished()
        tokens = sum(len(request.output_ids) for request in found)
        if found and tokens == self._tokens:
            raise NoProgressError(_stuck(found, self._turns, self._steps, self._since))
        self._advance(tokens)  # a data-parallel rank without requests takes part in the others' steps


def _stuck(found: Sequence[Request], turns: int, steps: int, since: int) -> str:
    first = found[0]
    return (
        f"no request advances: since step {since} the loop took {turns} turns with {steps} steps, and none of"
        f" {len(found)} unfinished requests got a token ({first.id} is {first.status.value}, with"
        f" {len(first.output_ids)} tokens)"
    )
