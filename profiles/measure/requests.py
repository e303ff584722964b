"""Records of requests, tokens and accepted drafts, collected by an observer of the scheduler; latencies of requests."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
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


@dataclass(slots=True)
class RequestTotals:
    """Requests that ended, and the tokens that they got: ``tokens`` by the instant at which the host knew them.
    ``accepted``: verifies of a request, by the tokens that each accepted before any cut at the end of the request."""

    records: list[RequestRecord] = field(default_factory=list)
    gaps: Distribution = field(default_factory=Distribution)  # between events of one finished request, ns
    tokens: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    retractions: int = 0
    peak_kv_tokens: int = 0
    scores_prompts: bool = False  # whether a request asked for log probabilities of its prompt

    @classmethod
    def merged(cls, parts: Sequence[RequestTotals]) -> RequestTotals:
        """Of workers that had a part of the requests each. ``peak_kv_tokens`` is that of the fullest pool."""
        whole = cls(
            records=[record for part in parts for record in part.records],
            gaps=Distribution.merged([part.gaps for part in parts]),
            retractions=sum(part.retractions for part in parts),
            peak_kv_tokens=max(part.peak_kv_tokens for part in parts),
            scores_prompts=any(part.scores_prompts for part in parts),
        )
        for part in parts:
            whole.tokens.update(part.tokens)
            whole.accepted.update(part.accepted)
        return whole

    def in_order(self) -> list[RequestRecord]:
        """Records by place in the workload."""
        return sorted(self.records, key=lambda record: record.index)


class RequestLog(Observer):
    """Observes tokens, accepted drafts, ends, retractions and KV usage."""

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
            self.totals.tokens[now] += count * len(got)

    def _hand_out(self) -> None:
        """Note the newest instants for each of their requests."""
        for request in self._requests:
            self._events[request.id].extend(self._newest)
        self._requests, self._newest = [], array("q")

    def ended(self, request: Request) -> None:
        self._hand_out()
        record = record_of(request, self._clock.now())
        self.totals.records.append(record)
        self.totals.scores_prompts |= request.sampling.prompt_logprobs
        events = self._events.pop(request.id, ())
        if record.finished:
            self.totals.gaps.extend(map(sub, islice(events, 1, None), events))

    def verified(self, request: Request, accepted: int) -> None:  # noqa: ARG002
        self.totals.accepted[accepted] += 1

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
