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
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, cast

from ...sched.observe import NO_STEP, SLEEP, StepInfo, StepKind
from ..cuda.log import Log
from ..measure.steps import STEADY
from ..record.timeline import Range
from ..vgpu.ledger import NO_CONTEXT, LedgerContext
from .capture import CapturedRange
from .maps import KindRule, RangeMap, RangeRule

UNKNOWN_KIND: Final[str] = "step"  # kind of a step without a range for its kind


class MappedRange(NamedTuple):
    """A range with its rule of the map, and the step that it belongs to."""

    span: CapturedRange
    rule: RangeRule
    step: int


class CapturedSteps(NamedTuple):
    """``launches`` are instants on the log's clock, by step. ``unknown_kinds`` is the number of steps of unknown kind,
    ``unseen`` that of steps that were settled, but launched before the capture began."""

    log: Log
    launches: Mapping[int, int]
    unknown_kinds: int
    unseen: int


def launches(spans: Sequence[CapturedRange], meaning: RangeMap) -> Counter[int]:
    """The number of launches by thread."""
    launch = re.compile(meaning.steps.launch)
    return Counter(span.thread for span in known(spans, meaning) if launch.fullmatch(span.name))


def known(spans: Sequence[CapturedRange], meaning: RangeMap) -> list[CapturedRange]:
    """The ranges of the map's domain. Torch's traces have no domains."""
    domain = meaning.domain
    return [span for span in spans if domain is None or span.domain in ("", domain)]


def read_steps(spans: Sequence[CapturedRange], meaning: RangeMap, *, epoch: int) -> CapturedSteps:
    """``spans`` are of one thread, in order of time; the log's clock starts at ``epoch``."""
    reader = _Reader([span for span in known(spans, meaning) if span.name], meaning)
    launches = reader.launches()
    settles = reader.settles(list(launches))
    ranges = list(reader.ranges(launches, settles))
    infos = reader.infos(launches)
    log = Log()
    for span, rule, step in ranges:
        name, of = (SLEEP, NO_STEP) if rule.category == "idle" else (rule.name, step)
        log.ranges.append(Range(name, of, 0, span.start - epoch, span.end - epoch))
    log.ranges += [
        Range(SLEEP, NO_STEP, 0, start - epoch, end - epoch) for start, end in reader.idle_rounds()
    ]
    log.launched += [infos[step] for step in sorted(launches, key=lambda step: launches[step])]
    settled = dict.fromkeys(settles[span] for span in sorted(settles, key=lambda span: span.start))
    log.settled += [infos[step] for step in settled if step in infos]
    for at, context in _contexts(ranges):
        log.contexts.change(at - epoch, context)
    unknown_kinds = sum(str(info.kind) == UNKNOWN_KIND for info in infos.values())
    instants = {step: at - epoch for step, at in launches.items()}
    return CapturedSteps(log, instants, unknown_kinds, sum(step == NO_STEP for step in settles.values()))


@dataclass(frozen=True, slots=True)
class _Reader:
    spans: Sequence[CapturedRange]
    meaning: RangeMap

    def launches(self) -> dict[int, int]:
        """When each step was launched. Of several launches with one number the first counts."""
        found = self._matching(self.meaning.steps.launch)
        if self.meaning.steps.number == "order":
            return {step: span.start for step, span in enumerate(found)}
        steps: dict[int, int] = {}
        for span in found:
            if _payload(span) != NO_STEP:
                steps.setdefault(_payload(span), span.start)
        return steps

    def settles(self, steps: Sequence[int]) -> dict[CapturedRange, int]:
        """The step that each settling range belongs to."""
        rule = self.meaning.steps
        found = self._matching(rule.settle) if rule.settle else []
        if rule.number == "payload":
            return {span: _payload(span) for span in found}
        unseen = self._unseen(found)
        return {
            span: steps[at - unseen] if 0 <= at - unseen < len(steps) else NO_STEP
            for at, span in enumerate(found)
        }

    def _unseen(self, settles: Sequence[CapturedRange]) -> int:
        """The number of settling ranges of earlier steps than the capture's: as the map says, or as settlings outnumber
        launches."""
        starts = [span.start for span in self._matching(self.meaning.steps.launch)]
        ahead = (at + 1 - bisect_left(starts, span.start) for at, span in enumerate(settles))
        previous = int(self.meaning.steps.settles == "previous")
        return max([previous, *ahead])

    def idle_rounds(self) -> Iterator[tuple[int, int]]:
        """Rounds of the loop in which nothing was launched and nothing settled."""
        rule = self.meaning.steps
        if rule.loop is None:
            return
        patterns = [rule.launch, *([rule.settle] if rule.settle else [])]
        events = sorted(span.start for pattern in patterns for span in self._matching(pattern))
        for start, end in pairwise(sorted(span.start for span in self._matching(rule.loop))):
            if start < end and bisect_left(events, start) == bisect_left(events, end):
                yield start, end

    def ranges(
        self, launches: Mapping[int, int], settles: Mapping[CapturedRange, int]
    ) -> Iterator[MappedRange]:
        rules = [(re.compile(rule.match), rule) for rule in self.meaning.ranges]
        order = sorted((at, step) for step, at in launches.items())
        settled = sorted((span.start, span.end, step) for span, step in settles.items())
        for span in self.spans:
            rule = next((rule for pattern, rule in rules if pattern.fullmatch(span.name)), None)
            if rule is not None and span.end > span.start:
                yield MappedRange(span, rule, self._step(span, rule, order, settled))

    def _step(
        self,
        span: CapturedRange,
        rule: RangeRule,
        launches: Sequence[tuple[int, int]],
        settles: Sequence[tuple[int, int, int]],
    ) -> int:
        if rule.of == "none" or rule.category == "idle":
            return NO_STEP
        if self.meaning.steps.number == "payload":
            return _payload(span)
        if rule.of == "settled":
            at = bisect_right(settles, (span.start, _LAST, _LAST))
            return settles[at - 1][2] if at else NO_STEP
        at = bisect_right(launches, (span.start, _LAST))
        if rule.of == "next":
            return launches[at][1] if at < len(launches) else NO_STEP
        return launches[at - 1][1] if at else NO_STEP

    def infos(self, launches: Mapping[int, int]) -> dict[int, StepInfo]:
        inside = self._inside(launches)
        rules = [(re.compile(rule.match), rule) for rule in self.meaning.kinds]
        return {step: _info(step, inside[step], rules) for step in launches}

    def _inside(self, launches: Mapping[int, int]) -> Mapping[int, list[CapturedRange]]:
        """The ranges and marks that may name a step's kind: those with its number, or those inside its launch."""
        found: defaultdict[int, list[CapturedRange]] = defaultdict(list)
        if self.meaning.steps.number == "payload":
            for span in self.spans:
                found[_payload(span)].append(span)
            return found
        order = sorted((at, step) for step, at in launches.items())
        ends = {span.start: span.end for span in self._matching(self.meaning.steps.launch)}
        for span in self.spans:
            at = bisect_right(order, (span.start, _LAST))
            if at and span.start <= ends[order[at - 1][0]]:
                found[order[at - 1][1]].append(span)
        return found

    def _matching(self, pattern: str) -> list[CapturedRange]:
        compiled = re.compile(pattern)
        return [span for span in self.spans if compiled.fullmatch(span.name)]


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


def _contexts(ranges: Sequence[MappedRange]) -> Iterator[tuple[int, LedgerContext]]:
    """The innermost open range after each instant at which a range opens or closes. Of ranges that overlap without
    nesting, the one that opened last is innermost."""
    edges = sorted(
        [(mapped.span.start, 1, at) for at, mapped in enumerate(ranges)]
        + [(mapped.span.end, 0, at) for at, mapped in enumerate(ranges)]
    )
    opened: dict[int, None] = {}
    for instant, opens, at in edges:
        if opens:
            opened[at] = None
        else:
            opened.pop(at, None)
        innermost = next(reversed(opened), None)
        if innermost is None:
            yield instant, NO_CONTEXT
        else:
            rule = ranges[innermost].rule
            yield instant, LedgerContext(rule.name, ranges[innermost].step, rule.category == "forward")
