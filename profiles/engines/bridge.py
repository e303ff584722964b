"""What stands between an engine's scheduler and a run: requests in, tokens and ends out, steps to the observers."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final

from ...sched.batch import FIRST_STEP, STEP_STRIDE, draft_step, extend_step
from ...sched.data_parallel.sync import PartitionedSource, RankShare, RankStatus, exchange
from ...sched.observe import NO_STEP, Observer, StepInfo, StepKind
from ...sched.relay.choice import loop_of
from ...sched.request import Request, Status
from ..record.provenance import NO_RELAY, RelayPart
from ..run.system import System, SystemParts
from ..vgpu.patching import surrounded
from .failures import EngineFaultError
from .names import EngineError


class AllEnded(BaseException):
    """Raised into the engine's loop, which runs for ever, when every request has ended."""


_REQUESTS: Final = "requests"  # of a turn of the loop, None after the last one


LOST: Final = "lost: the scheduler is idle and has not answered it"
_END: Final = -1  # of what a client is sent, behind its tokens


class RunBridge:
    """Takes requests from the run's source and reports what becomes of them, by id; numbers the engine's steps.

    All methods are called on the scheduler's thread, with arguments by position, as observers' are."""

    def __init__(self, parts: SystemParts, *, speculates: bool = False) -> None:
        """A step of an engine that ``speculates`` has its draft and its draft extend beside it (``sched.batch``)."""
        self.requests: dict[str, Request] = {}  # that have not ended
        self.lost = False  # whether the engine has lost a request
        self.streams = False  # whether all messages to clients are reported (``streamed``)
        self._speculates = speculates
        self.next_step, self._stride = (FIRST_STEP, STEP_STRIDE) if speculates else (0, 1)
        self.step = NO_STEP  # the one that has begun last
        self.observer: Observer = parts.observer
        self._clock = parts.clock
        self._share = parts.context.share
        placed = parts.context.place is not None or self._share is not None
        self._source = parts.context.source(parts.source) if placed else parts.source
        self._link, self._stage = parts.context.link, parts.context.stage
        self._rows: frozenset[str] = frozenset()
        self._begun: dict[int, StepInfo] = {}  # steady as far as is known
        self._sent: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))  # to clients

    # ---- requests ------------------------------------------------------------------------------------------

    def due(self, idle: bool) -> Sequence[Request]:
        """The requests that have arrived. An ``idle`` scheduler has lost those that have not ended, and sleeps until
        the next arrival. Raises AllEnded where it is idle and there is none. The later stages of a pipeline have the
        requests of the first one; a data-parallel rank is idle only together with all others."""
        if self._share is not None:
            return self._taken(self._due_together(self._share, idle))
        stage = self._stage
        arrived: Sequence[Request] | None = None
        if stage is not None and not stage.is_first:
            assert self._link is not None
            arrived = self._link.receive(stage.preceding, _REQUESTS).value
        else:
            with suppress(AllEnded):
                arrived = list(self._arrived(idle))
        if stage is not None and not stage.is_last:
            assert self._link is not None
            self._link.send(stage.following, _REQUESTS, arrived)
        if arrived is None:
            raise AllEnded
        return self._taken(arrived)

    def _taken(self, arrived: Sequence[Request]) -> Sequence[Request]:
        for request in arrived:
            self.requests[request.id] = request
            request.status = Status.RUNNING
        return arrived

    def _due_together(self, share: RankShare, idle: bool) -> Sequence[Request]:
        """The rank's requests that have arrived, once all ranks have said whether they are idle. Nothing of that takes
        time: an engine has no such message."""
        source = self._source
        assert isinstance(source, PartitionedSource) and self._link is not None
        status = RankStatus(busy=not idle, next_at=source.local_next_at(), ended=source.take_ended())
        found = exchange(self._link, share, status)
        source.apply(found)
        if not found.goes_on:
            self._lose_all()
            if found.next_at is None:
                raise AllEnded
            self._clock.sleep_until(found.next_at)
        return source.due(self._clock.now())

    def _arrived(self, idle: bool) -> Sequence[Request]:
        if idle:
            self._lose_all()
        arrived = self._source.due(self._clock.now())
        if idle and not arrived:
            instant = self._source.next_at()
            if instant is None:
                raise AllEnded
            self._clock.sleep_until(instant)
            arrived = self._source.due(self._clock.now())
        return arrived

    def _lose_all(self) -> None:
        for request_id in list(self.requests):
            self.lost = True
            self.end(request_id, Status.FAILED, LOST)

    def next_arrival(self) -> int | None:
        """When the next request arrives, ns; None after the last one."""
        return self._source.next_at()

    def numbered(self, index: int) -> Request | None:
        """Request number ``index`` of the workload, if it has not ended."""
        return next((request for request in self.requests.values() if request.index == index), None)

    def advance(self, request_id: str, output_ids: Sequence[int]) -> None:
        """``output_ids`` are all tokens that the engine has for the request by now. Raises EngineFaultError where those
        that were reported before have changed."""
        request = self.requests.get(request_id)
        if request is None:
            return
        reported = request.output_ids[: len(output_ids)]
        if reported != array("q", output_ids[: len(reported)]):
            pairs = zip(reported, output_ids, strict=False)
            at, was, now = next((at, was, now) for at, (was, now) in enumerate(pairs) if was != now)
            raise EngineFaultError(
                f"request {request_id}: output token {at} was reported as {was} and became {now}"
            )
        if len(output_ids) <= len(request.output_ids):
            return
        new = output_ids[len(request.output_ids) :]
        request.output_ids.extend(new)
        if request.first_token_at is None:
            request.first_token_at = self._clock.now()
        self.observer.tokens([request], len(new))

    def streamed(
        self,
        request_id: str,
        output_ids: Sequence[int],
        ended: bool,
        logprobs: Sequence[float] = (),
        prompt_logprobs: Sequence[float] = (),
    ) -> None:
        """A message to the request's client has these tokens, their log probabilities and those of the prompt;
        ``ended``: it says that the request has ended."""
        request = self.requests.get(request_id)
        if request is None:
            return
        request.output_logprobs += logprobs if request.sampling.logprobs else ()
        request.prompt_logprobs += prompt_logprobs if request.sampling.prompt_logprobs else ()
        self._sent[request_id].extend([*output_ids, _END] if ended else output_ids)

    def ending(self, request_id: str, row: int) -> None:
        """The engine is about to release the KV of the request, whose slots are in that row of its page table."""
        if request := self.requests.get(request_id):
            request.req_pool_idx = row
            self.observer.ending(request)

    def end(self, request_id: str, status: Status, reason: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        sent = self._sent.pop(request_id, ())
        if self.streams and status is Status.FINISHED and (fault := _wrong_stream(sent, request.output_ids)):
            status, reason = Status.FAILED, fault
        request.status, request.reason = status, reason
        request.finished_at = self._clock.now()
        self.observer.ended(request)
        self._source.ended(request, request.finished_at)

    def finish(self, request_id: str) -> None:
        """The engine has ended the request by its length, or else by a token that ends it."""
        if request := self.requests.get(request_id):
            full = len(request.output_ids) == request.sampling.max_new_tokens
            self.end(request_id, Status.FINISHED, "length" if full else "stop")

    def verified(self, request_id: str, accepted: int) -> None:
        """A verify has accepted that many tokens of the request, the bonus included."""
        if request := self.requests.get(request_id):
            self.observer.verified(request, accepted)

    def retracted(self, request_id: str) -> None:
        if request := self.requests.get(request_id):
            request.retraction_count += 1
            self.observer.retracted(request)

    # ---- steps ---------------------------------------------------------------------------------------------

    def range(self, name: str, size: int, step: int = NO_STEP) -> AbstractContextManager[object]:
        """A range of the step that is planned next, or of ``step``."""
        return self.observer.range(name, self.next_step if step == NO_STEP else step, size)

    def planned(self, kind: StepKind) -> None:
        self.observer.planned(self.next_step, kind)

    def begin_step(
        self, kind: StepKind, cached: Mapping[str, int], tokens: int, penalised: bool = False
    ) -> int:
        """The number of the step that is about to be launched. ``cached``: its requests, in order, with the prompt
        tokens of each that came from the prefix cache."""
        self.step = step = self.next_step
        self.next_step += self._stride
        for request_id, found in cached.items():
            request = self.requests.get(request_id)
            if request is not None and request.first_scheduled_at is None:
                request.first_scheduled_at = self._clock.now()
                request.cached_tokens = found
        rows = frozenset(cached)  # mini-sglang has them in a set, in any order
        steady = rows == self._rows and not penalised
        self._begun[step] = StepInfo(step, kind, len(rows), tokens, steady=steady)
        self._rows = rows
        return step

    def launched(self, step: int) -> None:
        for part in self._announced(self._begun[step]._replace(steady=False)):
            self.observer.launched(part)

    def settled(self, step: int, ended: bool) -> None:
        """The result of a step has been applied. ``ended``: a request of it has ended."""
        info = self._begun.pop(step)
        for part in self._announced(info._replace(steady=info.steady and not ended)):
            self.observer.settled(part)

    def _announced(self, info: StepInfo) -> Sequence[StepInfo]:
        """The steps that a step is announced as, in the order of their forwards."""
        if not self._speculates:
            return [info]
        extend = info._replace(step=extend_step(info.step), kind="draft_extend")
        if info.kind != "verify":
            return [info, extend]
        draft = info._replace(step=draft_step(info.step), kind="draft", num_tokens=info.batch_size)
        return [draft, info, extend]


def _wrong_stream(sent: Sequence[int], made: Sequence[int]) -> str:
    """Where a client was not sent all tokens that were made, in order and once, and then the end; or nothing."""
    names = {_END: "the end", None: "nothing"}
    for at, pair in enumerate(zip_longest(sent, [*made, _END])):
        if pair[0] != pair[1]:
            was, meant = (names.get(entry, f"token {entry}") for entry in pair)
            return f"its client was sent {was} as output token {at} instead of {meant}"
    return ""


def wrap_methods(
    holder: Any,
    around: Mapping[str, Callable[..., Any]],
    optional: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> None:
    """Have an object or a class call the function of a method's name, with the method in front of its arguments.
    ``optional``: those that only some releases have. Raises EngineError where a method has another name: steps, tokens
    or ends would be missing."""
    if missing := [name for name in around if not hasattr(holder, name)]:
        kind = holder if isinstance(holder, type) else type(holder)
        raise EngineError(
            f"the engine's {kind.__name__} has no {', '.join(missing)}, from which schedbench reads steps"
        )
    for name, function in {**around, **optional}.items():
        if hasattr(holder, name):
            setattr(holder, name, surrounded(getattr(holder, name), function))


def ranged(
    reports: RunBridge, name: str, size: Callable[[], int] = int, step: Callable[[], int] = lambda: NO_STEP
) -> Callable[..., Any]:
    """What ``wrap_methods`` takes for a method that is in a range."""

    def inside(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with reports.range(name, size(), step()):
            return original(*args, **kwargs)

    return inside


class EngineSystem(System):
    """What the systems of all engines have in common."""

    overlapped = False  # results of a step are applied after the launch of the next one

    def __init__(self, parts: SystemParts, *, speculates: bool = False) -> None:
        self._parts = parts
        self._bridge = RunBridge(parts, speculates=speculates)
        self._reports = parts.machine.host.excluded(self._bridge)  # its methods, which take no host time

    @property
    def next_step(self) -> int:
        return self._bridge.next_step

    def relay_part(self) -> RelayPart:
        loop = loop_of(overlap=self.overlapped, staged=self._parts.context.stage is not None)
        return RelayPart(state=NO_RELAY, loop=loop)

    def unfinished(self) -> Sequence[Request]:
        return list(self._bridge.requests.values())
