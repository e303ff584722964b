"""Makes the log of a run from the ranges of a thread, by a map.

The steps of a loop, counted in the order of their launches::

    recv  prepare  launch k  settle k-1  recv  prepare  launch k+1  settle k
    |-- next: k --|          |- settled -|-- next: k+1 --|
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, cast

from ...sched.observe import NO_STEP, SLEEP, StepInfo, StepKind
from ..cuda.log import Log
from ..measure.steps import STEADY
from ..record.timeline import Range
from ..vgpu.ledger import NO_CONTEXT, LedgerContext
from .capture import CapturedRange
from .maps import KindRule, RangeMap, RangeRule

UNKNOWN_KIND: Final[str] = "step"  # kind of a step without a range for its kind


def launches(spans: Sequence[CapturedRange], meaning: RangeMap) -> Counter[int]:
    """The number of launches by thread."""
    launch = re.compile(meaning.steps.launch)
    return Counter(span.thread for span in known(spans, meaning) if launch.fullmatch(span.name))


def known(spans: Sequence[CapturedRange], meaning: RangeMap) -> list[CapturedRange]:
    """The ranges of the map's domain. Torch's traces have no domains."""
    domain = meaning.domain
    return [span for span in spans if domain is None or span.domain in ("", domain)]


class CapturedSteps:
    """The log of one thread's ranges, ``spans`` in order of time; its clock starts at ``epoch``. ``launches`` are
    instants on that clock, by step. ``unknown_kinds`` is the number of steps of unknown kind, ``unseen`` that of steps
    that were settled, but launched before the capture began."""

    def __init__(self, spans: Sequence[CapturedRange], meaning: RangeMap, *, epoch: int) -> None:
        self._spans, self._meaning = [span for span in known(spans, meaning) if span.name], meaning
        self._is_numbered = meaning.steps.number == "payload"
        self._launching = self._matching(meaning.steps.launch)
        self._settling = self._matching(meaning.steps.settle)
        steps: dict[int, int] = {}  # of several launches with one number the first counts
        for at, span in enumerate(self._launching):
            steps.setdefault(_payload(span) if self._is_numbered else at, span.start)
        # In order of time: the instant and the number of each step; the start and the end of each settling range with
        # the step that it belongs to.
        self._launched = sorted((at, step) for step, at in steps.items() if step != NO_STEP)
        self._settled = sorted(
            (span.start, span.end, step)
            for span, step in zip(self._settling, self._settled_steps(), strict=True)
        )
        ranges, infos = [*self._ranges(epoch)], self._infos()
        settled = [step for *_, step in self._settled]
        self.log = Log(
            [span for span, _ in ranges],
            launched=[infos[step] for _, step in self._launched],
            settled=[infos[step] for step in dict.fromkeys(settled) if step in infos],
        )
        for start, end in self._idle_rounds():
            self.log.ranges.append(Range(SLEEP, NO_STEP, 0, start - epoch, end - epoch))
        for at, context in _contexts(ranges):
            self.log.contexts.change(at, context)
        self.launches: Mapping[int, int] = {step: at - epoch for at, step in self._launched}
        self.unknown_kinds = sum(str(info.kind) == UNKNOWN_KIND for info in infos.values())
        self.unseen = settled.count(NO_STEP)

    def _matching(self, pattern: str | None) -> list[CapturedRange]:
        compiled = re.compile(pattern) if pattern else None
        return [span for span in self._spans if compiled and compiled.fullmatch(span.name)]

    def _settled_steps(self) -> list[int]:
        """The step that each settling range belongs to. The first ranges belong to steps from before the capture: as
        many as the map says, or as settlings outnumber launches."""
        if self._is_numbered:
            return [_payload(span) for span in self._settling]
        starts = [span.start for span in self._launching]
        ahead = (at + 1 - bisect_left(starts, span.start) for at, span in enumerate(self._settling))
        unseen = max([int(self._meaning.steps.settles == "previous"), *ahead])
        steps = (at - unseen for at in range(len(self._settling)))
        return [step if 0 <= step < len(starts) else NO_STEP for step in steps]

    def _idle_rounds(self) -> Iterator[tuple[int, int]]:
        """Rounds of the loop in which nothing was launched and nothing settled."""
        events = sorted(span.start for span in (*self._launching, *self._settling))
        rounds = sorted(span.start for span in self._matching(self._meaning.steps.loop))
        for start, end in pairwise(rounds):
            if start < end and bisect_left(events, start) == bisect_left(events, end):
                yield start, end

    def _ranges(self, epoch: int) -> Iterator[tuple[Range, LedgerContext]]:
        """The ranges that have a rule, on the log's clock, and the context in each."""
        rules = [(re.compile(rule.match), rule) for rule in self._meaning.ranges]
        for span in self._spans:
            rule = next((rule for pattern, rule in rules if pattern.fullmatch(span.name)), None)
            if rule is not None and span.end > span.start:
                name, step = SLEEP if rule.category == "idle" else rule.name, self._step(span, rule)
                context = LedgerContext(rule.name, step, rule.category == "forward")
                yield Range(name, step, 0, span.start - epoch, span.end - epoch), context

    def _step(self, span: CapturedRange, rule: RangeRule) -> int:
        if rule.of == "none" or rule.category == "idle":
            return NO_STEP
        if self._is_numbered:
            return _payload(span)
        if rule.of == "settled":
            at = bisect_right(self._settled, (span.start, _LAST, _LAST))
            return self._settled[at - 1][2] if at else NO_STEP
        at = bisect_right(self._launched, (span.start, _LAST))
        if rule.of == "next":
            return self._launched[at][1] if at < len(self._launched) else NO_STEP
        return self._launched[at - 1][1] if at else NO_STEP

    def _infos(self) -> dict[int, StepInfo]:
        inside = self._inside()
        rules = [(re.compile(rule.match), rule) for rule in self._meaning.kinds]
        return {step: _info(step, inside[step], rules) for _, step in self._launched}

    def _inside(self) -> Mapping[int, list[CapturedRange]]:
        """The ranges and marks that may name a step's kind: those with its number, or those inside its launch."""
        found: defaultdict[int, list[CapturedRange]] = defaultdict(list)
        ends = {span.start: span.end for span in self._launching}
        for span in self._spans:
            at = bisect_right(self._launched, (span.start, _LAST))
            if self._is_numbered:
                found[_payload(span)].append(span)
            elif at and span.start <= ends[self._launched[at - 1][0]]:
                found[self._launched[at - 1][1]].append(span)
        return found


_LAST: Final = 2**63


def _payload(span: CapturedRange) -> int:
    return span.payload if span.payload is not None and 0 <= span.payload < _LAST else NO_STEP


def _info(
    step: int, inside: Sequence[CapturedRange], rules: Sequence[tuple[re.Pattern[str], KindRule]]
) -> StepInfo:
    for pattern, rule in rules:
        for span in inside:
            if pattern.fullmatch(span.name) and (rule.payload is None or span.payload in rule.payload):
                kind, size = rule.kind, max((_size(other, rule.size) for other in inside), default=0)
                return StepInfo(
                    step, cast(StepKind, kind.removesuffix(STEADY)), size, 0, kind.endswith(STEADY)
                )
    return StepInfo(step, cast(StepKind, UNKNOWN_KIND), 0, 0, False)


def _size(span: CapturedRange, pattern: str | None) -> int:
    match = re.search(pattern, span.name) if pattern else None
    text = match[1] if match and match.groups() else ""
    return int(text) if text and text.isdecimal() and len(text) < 10 else 0


def _contexts(ranges: Sequence[tuple[Range, LedgerContext]]) -> Iterator[tuple[int, LedgerContext]]:
    """The innermost open range after each instant at which a range opens or closes; between two ranges, the step of the
    first. Of ranges that overlap without nesting, the one that opened last is innermost."""
    edges = sorted(
        [(span.start, 1, at) for at, (span, _) in enumerate(ranges)]
        + [(span.end, 0, at) for at, (span, _) in enumerate(ranges)]
    )
    opened: dict[int, None] = {}
    for instant, opens, at in edges:
        if opens:
            opened[at] = None
        else:
            opened.pop(at, None)
        innermost, closed = next(reversed(opened), None), ranges[at][1]
        yield instant, closed.after(NO_CONTEXT) if innermost is None else ranges[innermost][1]
    if edges:  # nothing is between the last range and another
        yield edges[-1][0], NO_CONTEXT
