"""From a scenario to its requests.

Lengths and instants are drawn at once, a prompt only when its request is taken: a trace of millions of tokens
costs the memory of the requests that have not ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from ..sched.config import SamplingParams
from ..sched.request import Request
from .fields import Achieved, Lengths
from .problems import show
from .schema import Scenario
from .script import Counts, RandomStream, Script, draw, packed, samplings, script_of, stream, summarise, text
from .workload_schema import (
    Arrival,
    BurstArrivals,
    ClosedArrivals,
    ConstantArrivals,
    GammaArrivals,
    PoissonArrivals,
    RecordedArrivals,
    Sampling,
)

SECOND = 1_000_000_000
_LAST = 2**62  # ns: beyond any run, and still an int64
_REQUEST = re.compile(r"r(0|[1-9][0-9]{0,8})")


@dataclass(eq=False, slots=True)
class Workload:
    """One pass over the requests of a scenario. Another pass needs another workload.

    Open arrivals come from ``upcoming``. In a closed loop, which has ``clients``, ``upcoming`` has the first request of
    every client, and ``on_end`` returns the next request when one has ended. ``aborts`` has, by request id, the number
    of output tokens after which its client disconnects. The prompts' lengths in ``script`` count the ``encoder_tokens``
    [n], whose ids ``encoder`` makes of a key and a length.
    """

    script: Script
    encoder_tokens: Counts
    encoder: Callable[..., Counts]
    instants: Counts
    clients: int | None
    aborts: Mapping[str, int]
    achieved: Achieved
    _taken: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self.instants)

    def upcoming(self) -> Iterator[Request]:
        """The requests that do not wait for the end of another, by arrival. Each is built when it is taken."""
        first = len(self) if self.clients is None else min(self.clients, len(self))
        while self._taken < first:
            yield self._take(int(self.instants[self._taken]))

    def on_end(self, request: Request, now: int) -> Request | None:  # noqa: ARG002
        """The next request of the client of ``request``, sent at ``now`` (ns); None when there is none left."""
        if self.clients is None or self._taken == len(self):
            return None
        return self._take(now)

    def _take(self, arrival: int) -> Request:
        script, index = self.script, self._taken
        self._taken += 1
        length = int(script.prompt_tokens[index])
        first = int(self.encoder_tokens[index])
        prompt = script.prompt(index, length - first)
        return Request(
            id=request_id(index),
            origin_input_ids=packed(self.encoder(key=index, length=first)) + prompt if first else prompt,
            encoder_len=first,
            sampling=params(script.sampling(index), max_new_tokens=int(script.output_tokens[index])),
            arrival=arrival,
            index=index,
        )


def build(scenario: Scenario, *, vocab_size: int, context_len: int, seed: int) -> Workload:
    """The scenario's requests for a model of that vocabulary and context. Equal seeds, equal requests.

    Raises ScenarioError, or TraceError when a trace is malformed.
    """
    script = script_of(scenario, vocab_size=vocab_size, seed=seed)
    if scenario.engine.embedding:  # one token stands for the result
        script = replace(script, output_tokens=np.ones(len(script), np.int64))
    wanted, rng = scenario.workload.encoder_tokens, stream(seed, RandomStream.ENCODER_TOKENS)
    encoder_tokens = np.zeros(len(script), np.int64) if wanted is None else draw(wanted, len(script), rng=rng)
    whole = script.prompt_tokens + encoder_tokens
    prompt_tokens = np.minimum(whole, context_len - 1)
    output_tokens = np.minimum(script.output_tokens, context_len - prompt_tokens)
    encoder_tokens = np.minimum(encoder_tokens, prompt_tokens - 1)
    clipped = (prompt_tokens < whole) | (output_tokens < script.output_tokens)
    prompts, outputs = script.requested or (None, None)
    arrival = _arrival(scenario, script)
    instants = np.zeros(len(script), dtype=np.int64) if script.instants is None else script.instants
    return Workload(
        replace(script, prompt_tokens=prompt_tokens, output_tokens=output_tokens),
        encoder_tokens,
        partial(text, seed, RandomStream.ENCODER, vocab_size=vocab_size),
        instants=arrivals(arrival, instants, rng=stream(seed, RandomStream.ARRIVAL)),
        clients=arrival.concurrency if isinstance(arrival, ClosedArrivals) else None,
        aborts=_aborts(scenario, size=len(script), seed=seed),
        achieved=Achieved(
            len(script),
            Lengths(prompts, summarise(prompt_tokens - encoder_tokens)),
            Lengths(outputs, summarise(output_tokens)),
            int(clipped.sum()),
            script.left_out,
        ),
    )


def request_id(index: int) -> str:
    """The id of request number ``index`` (from 0) in scenarios and results."""
    return f"r{index}"


def _arrival(scenario: Scenario, script: Script) -> Arrival:
    arrival = scenario.workload.arrival
    if isinstance(arrival, RecordedArrivals) and script.instants is None:
        key = ("workload", "arrival", "process")
        raise scenario.source.refuse(key, "the trace has no arrival instants, expected another process")
    if arrival is None:
        return (
            BurstArrivals(process="burst") if script.instants is None else RecordedArrivals(process="trace")
        )
    return arrival


@lru_cache(maxsize=128)
def params(sampling: Sampling, *, max_new_tokens: int) -> SamplingParams:
    """The engine's record of a scenario's sampling section."""
    given = {key: getattr(sampling, key) for key in type(sampling).model_fields if key != "grammar"}
    grammar = sampling.grammar.spec if sampling.grammar else None
    return SamplingParams(max_new_tokens=max_new_tokens, grammar=grammar, **given)


def penalised(scenario: Scenario) -> bool:
    """Whether some request has penalties, or a least length. Raises TraceError."""
    return any(params(sampling, max_new_tokens=1).penalised for sampling in samplings(scenario))


def _aborts(scenario: Scenario, *, size: int, seed: int) -> dict[str, int]:
    """The requests that are aborted, named or drawn at random, with the number of tokens after which they are."""
    abort = scenario.workload.abort
    if abort is None:
        return {}
    order = stream(seed, RandomStream.ABORT).permutation(size)
    drawn_ids = {request_id(int(index)) for index in order[: round(abort.fraction * size)]}
    numbers = {name: _REQUEST.fullmatch(name) for name in abort.requests}
    if unknown := sorted(name for name, found in numbers.items() if found is None or int(found[1]) >= size):
        message = f"expected r0 to r{size - 1}, got {show(unknown[0])}"
        raise scenario.source.refuse(("workload", "abort", "requests"), message)
    return dict.fromkeys(sorted(drawn_ids | numbers.keys()), abort.after_tokens)


def arrivals(process: Arrival, instants: Counts, *, rng: np.random.Generator) -> Counts:
    """Ascending arrival times, the first at 0. ``instants`` [n] are the trace's, zeros without one.

    The requests of a closed loop arrive when their client sends them; here they are all at 0.
    """
    n = len(instants)
    match process:
        case BurstArrivals() | ClosedArrivals():
            return np.zeros(n, dtype=np.int64)
        case ConstantArrivals():
            return _nanoseconds(np.arange(n) / process.rate)
        case PoissonArrivals():
            return _after(rng.exponential(1 / process.rate, n))
        case GammaArrivals():
            shape = process.burstiness
            return _after(rng.gamma(shape, 1 / (process.rate * shape), n))
        case RecordedArrivals():
            return _nanoseconds((instants - instants[:1]) / (process.speed * SECOND))


def _after(gaps: NDArray[np.float64]) -> Counts:
    return _nanoseconds(np.cumsum(gaps) - gaps[:1])


def _nanoseconds(seconds: NDArray[np.float64]) -> Counts:
    return np.minimum(np.rint(seconds * SECOND), _LAST).astype(np.int64)
