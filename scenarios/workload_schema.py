"""The ``workload`` section: the requests, their lengths, and their arrival."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..sched.config import ControlAction
from .fields import Count, Fraction, Positive, Rate, Requests, Section, Several, Switch, bare

Length = Annotated[int, Field(ge=1, le=2**24)]
Real = Annotated[float, Field(ge=1e-6, le=2**24)]
TraceFormat = Literal["mooncake", "azure", "burstgpt", "sharegpt", "jsonl"]


class Fixed(Section):
    dist: Literal["fixed"]
    value: Length
    """Every length, in tokens."""


class Uniform(Section):
    """Both ends included."""

    dist: Literal["uniform"]
    min: Length
    """The smallest length."""
    max: Length
    """The largest length, included."""


class Normal(Section):
    """Rounded to whole tokens, then cut to [min, max]."""

    dist: Literal["normal"]
    mean: Real
    """The mean of the distribution before it is cut."""
    std: Real
    """Its standard deviation."""
    min: Length = 1
    """Shorter lengths become this one."""
    max: Length | None = None
    """Longer lengths become this one."""


class LogNormal(Section):
    """Rounded to whole tokens, then cut to [min, max]."""

    dist: Literal["lognormal"]
    mean: Real
    """The mean of the lengths, not of their logarithm."""
    std: Real
    """Their standard deviation."""
    min: Length = 1
    """Shorter lengths become this one."""
    max: Length | None = None
    """Longer lengths become this one."""


Distribution = Annotated[
    Fixed | Uniform | Normal | LogNormal, Field(discriminator="dist"), bare("value", int, dist="fixed")
]
"""Of token counts; a bare number is fixed."""


class BurstArrivals(Section):
    """All requests at time zero."""

    process: Literal["burst"]


class ConstantArrivals(Section):
    """Evenly spaced."""

    process: Literal["constant"]
    rate: Rate
    """Requests per second."""


class PoissonArrivals(Section):
    process: Literal["poisson"]
    rate: Rate
    """Requests per second, on average."""


class GammaArrivals(Section):
    """Gaps of a gamma distribution."""

    process: Literal["gamma"]
    rate: Rate
    """Requests per second, on average."""
    burstiness: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    """The shape of the distribution: 1 is Poisson, smaller values are burstier."""


class RecordedArrivals(Section):
    """The instants of the trace."""

    process: Literal["trace"]
    speed: Rate = 1.0
    """How many times as fast as recorded."""


class ClosedArrivals(Section):
    """A fixed number of clients."""

    process: Literal["closed"]
    concurrency: Positive
    """Clients, each of which sends its next request when one has ended."""


Arrival = Annotated[
    BurstArrivals | ConstantArrivals | PoissonArrivals | GammaArrivals | RecordedArrivals | ClosedArrivals,
    Field(discriminator="process"),
    bare("process"),
]


class SharedPrefix(Section):
    """Every prompt begins with the ``tokens`` of one of ``groups`` prefixes, on top of its prompt_tokens."""

    groups: Positive
    """The number of different prefixes."""
    tokens: Length
    """The length of each prefix, on top of prompt_tokens."""


class GrammarSection(Section):
    """Exactly one: a regular expression, or the texts to choose from."""

    regex: str | None = None
    """A regular expression that every output matches."""
    choice: Several[str] = ()
    """The texts of which every output is one."""

    @property
    def spec(self) -> tuple[Literal["regex", "choice"], tuple[str, ...]]:
        return ("choice", self.choice) if self.regex is None else ("regex", (self.regex,))


class Sampling(Section):
    """How every request's tokens are chosen. End-of-sequence tokens are ignored by default, so that a
    request has the length that the workload gives it."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """0 is greedy."""
    top_k: Count = 0
    """Sample among so many tokens; 0: among all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the most probable tokens up to this probability."""
    min_p: Fraction = 0.0
    """Leave out tokens below this share of the most probable one's probability."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from a token's logit for each time that it occurred."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from a token's logit once it occurred."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Divides the logit of a token that occurred."""
    min_new_tokens: Count = 0
    """No token ends a request before so many output tokens."""
    stop_token_ids: Several[Count] = ()
    """Tokens that end a request."""
    ignore_eos: Switch = True
    """Whether a request goes on after an end-of-sequence token."""
    logprobs: Switch = False
    """Whether the log probability of each token is returned."""
    prompt_logprobs: Switch = False
    """Whether the log probabilities of the prompt's tokens are returned, so that none comes from the prefix cache."""
    hidden_states: Switch = False
    """Whether the last hidden state of each computed token is returned; such batches are not replayed as graphs."""
    grammar: GrammarSection | None = None
    """The grammar that outputs follow."""

    @property
    def penalised(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1


class Abort(Section):
    """Clients that disconnect after ``after_tokens`` output tokens: a share of all requests, or those named."""

    fraction: Fraction = 0.0
    """The share of all requests that is aborted."""
    requests: Several[str] = ()
    """The requests that are aborted, by id."""
    after_tokens: Count = 0
    """They are aborted after so many output tokens."""


class ScriptedControl(Section):
    """What a client asks of the whole engine before batch number ``at`` of a run is planned. It stops for ``ms``:
    ``pause`` with a result in flight, ``pause_and_settle`` with none, ``pause_and_retract`` without KV of any request.
    ``abort_all`` ends all requests; ``flush`` empties the prefix cache as soon as the engine is idle."""

    action: ControlAction
    """What the client asks for."""
    at: Count
    """The number of the batch before which it is asked."""
    ms: Rate | None = None
    """How long the engine stops."""


class WorkloadSection(Section):
    """Drawn from distributions, or the first ``requests`` of a trace. Without ``arrival`` a trace keeps its
    own instants where it has any; everything else is a burst. ``encoder_tokens``: those of an encoder-decoder, in front
    of each prompt."""

    requests: Annotated[Requests, Field(ge=1)] | None = None
    """The number of requests; of a trace, of those that are read."""
    arrival: Arrival | None = None
    """When requests arrive; a bare name is a process without further keys."""
    prompt_tokens: Distribution | None = None
    """Lengths of prompts; a bare number is fixed."""
    output_tokens: Distribution | None = None
    """Lengths of outputs."""
    encoder_tokens: Distribution | None = None
    """Lengths of an encoder's tokens, in front of each prompt."""
    shared_prefix: SharedPrefix | None = None
    """Prefixes that prompts share."""
    sampling: Sampling = Sampling()
    """How tokens are chosen."""
    abort: Abort | None = None
    """Requests that clients give up."""
    controls: Several[ScriptedControl] = ()
    """What a client asks of the whole engine."""
    trace: str | None = None
    """A file of recorded requests, instead of the lengths."""
    format: TraceFormat | None = None
    """The format of the trace."""
