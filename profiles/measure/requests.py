"""Records of requests, tokens and accepted drafts, collected by observers of the scheduler; latencies of requests."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import sub
from typing import Literal

from ...sched.observe import Clock, Observer
from ...sched.request import Request
from .distribution import Distribution


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that ended. Instants are ns of the run's clock."""

    id: str
    index: int
    arrival: int
    first_scheduled: int | None
    first_token: int | None
    finish: int
    prompt_tokens: int
    cached_tokens: int
    output_ids: array[int]
    status: str
    reason: str
    prefilled: int | None = None  # instants of a prefill worker and its transfer, where there is one
    transferred: int | None = None
    embedding: tuple[float, ...] = ()
    logprobs: tuple[float, ...] = ()  # of the prompt, then of the output, where they were asked for

    @property
    def output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def finished(self) -> bool:
        return self.status == "finished"


def record_of(request: Request, now: int) -> RequestRecord:
    """The record of a request that has ended, by ``now`` where it has no instant of its end."""
    return RequestRecord(
        id=request.id,
        index=request.index,
        arrival=request.arrival,
        first_scheduled=request.first_scheduled_at,
        prefilled=request.prefilled_at,
        transferred=request.transferred_at,
        first_token=request.first_token_at,
        finish=now if request.finished_at is None else request.finished_at,
        prompt_tokens=len(request.origin_input_ids),
        cached_tokens=request.cached_tokens,
        output_ids=request.output_ids,
        embedding=request.embedding,
        logprobs=(*request.prompt_logprobs, *request.output_logprobs),
        status=request.status.value,
        reason=request.reason,
    )


@dataclass(eq=False, slots=True)
class TokenLog:
    """The number of tokens that the host knew at each instant."""

    _times: array[int] = field(default_factory=lambda: array("q"))
    _totals: array[int] = field(default_factory=lambda: array("q"))

    def add(self, now: int, count: int) -> None:
        if self._times and self._times[-1] == now:
            self._totals[-1] += count
        else:
            self._times.append(now)
            self._totals.append(self.total + count)

    @property
    def total(self) -> int:
        return self._totals[-1] if self._totals else 0

    @classmethod
    def merged(cls, parts: Iterable[TokenLog]) -> TokenLog:
        """The tokens of several workers together."""
        whole = cls()
        for now, count in sorted(entry for part in parts for entry in part.entries()):
            whole.add(now, count)
        return whole

    def entries(self) -> Iterator[tuple[int, int]]:
        """Instants with the number of tokens that became known at each."""
        before = 0
        for now, total in zip(self._times, self._totals, strict=True):
            yield now, total - before
            before = total

    def within(self, start: int, end: int) -> int:
        """Tokens of (start, end]: a token that became known at an instant was made before it."""
        return self._until(end) - self._until(start)

    def _until(self, instant: int) -> int:
        at = bisect_right(self._times, instant)
        return self._totals[at - 1] if at else 0


@dataclass(slots=True)
class RequestTotals:
    """Requests that ended, and the tokens that they got."""

    records: list[RequestRecord] = field(default_factory=list)
    gaps: Distribution = field(default_factory=Distribution)  # between events of one finished request, ns
    tokens: TokenLog = field(default_factory=TokenLog)
    retractions: int = 0
    peak_kv_tokens: int = 0

    @classmethod
    def merged(cls, parts: Sequence[RequestTotals]) -> RequestTotals:
        """Of workers that had a part of the requests each. ``peak_kv_tokens`` is that of the fullest pool."""
        return cls(
            records=[record for part in parts for record in part.records],
            gaps=Distribution.merged([part.gaps for part in parts]),
            tokens=TokenLog.merged([part.tokens for part in parts]),
            retractions=sum(part.retractions for part in parts),
            peak_kv_tokens=max(part.peak_kv_tokens for part in parts),
        )

    def in_order(self) -> list[RequestRecord]:
        """Records by place in the workload."""
        return sorted(self.records, key=lambda record: record.index)


class RequestLog(Observer):
    """Observes tokens, ends, retractions and KV usage."""

    def __init__(self, clock: Clock) -> None:
        self.totals = RequestTotals()
        self._clock = clock
        # Of requests that have not ended: when each got tokens. The newest of these instants are of ``_requests``.
        self._events: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        self._requests: list[Request] = []
        self._newest = array("q")

    def tokens(self, requests: Sequence[Request], count: int) -> None:
        now, got = self._clock.now(), [*requests]
        if got != self._requests:
            self._hand_out()
            self._requests = got
        self._newest.append(now)
        if got:
            self.totals.tokens.add(now, count * len(got))

    def _hand_out(self) -> None:
        """Note the newest instants for each of their requests."""
        for request in self._requests:
            self._events[request.id].extend(self._newest)
        self._requests, self._newest = [], array("q")

    def ended(self, request: Request) -> None:
        self._hand_out()
        record = record_of(request, self._clock.now())
        self.totals.records.append(record)
        events = self._events.pop(request.id, ())
        if record.finished:
            self.totals.gaps.extend(map(sub, islice(events, 1, None), events))

    def retracted(self, request: Request) -> None:  # noqa: ARG002
        self.totals.retractions += 1

    def kv_usage(self, used_tokens: int) -> None:
        totals = self.totals
        totals.peak_kv_tokens = max(totals.peak_kv_tokens, used_tokens)


Instant = Literal["arrival", "first_scheduled", "prefilled", "transferred", "first_token", "finish"]


def between(records: Sequence[RequestRecord], start: Instant, end: Instant) -> Distribution:
    """Times from one instant to another in ns, of the finished requests that have both."""
    spans = ((getattr(r, start), getattr(r, end)) for r in records if r.finished)
    return Distribution(to - begin for begin, to in spans if begin is not None and to is not None)


def tpot(records: Sequence[RequestRecord]) -> Distribution:
    """Time per output token after the first, rounded down to ns. Requests with a single token have none."""
    return Distribution(
        (r.finish - r.first_token) // (r.output_tokens - 1)
        for r in records
        if r.finished and r.first_token is not None and r.output_tokens > 1
    )


@dataclass(eq=False)
class AcceptanceLog(Observer):
    """Counts the verifies of requests by the tokens that each accepted, before any cut at the end of a request."""

    _verifies: Counter[int] = field(default_factory=Counter)

    @classmethod
    def merged(cls, logs: Iterable[AcceptanceLog]) -> AcceptanceLog:
        """The log of several workers, each of which had a part of the requests."""
        whole = cls()
        for log in logs:
            whole._verifies += log._verifies
        return whole

    def verified(self, request: Request, accepted: int) -> None:  # noqa: ARG002
        self._verifies[accepted] += 1

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify; None where nothing was verified."""
        total = self._verifies.total()
        return sum(length * count for length, count in self._verifies.items()) / total if total else None

    def by_position(self, drafts: int) -> list[float]:
        """The share of verifies that accepted each of the first ``drafts`` draft positions."""
        total = self._verifies.total()
        reached = (
            sum(count for length, count in self._verifies.items() if length > position)
            for position in range(1, drafts + 1)
        )
        return [count / total for count in reached] if total else []
