"""The ``workload`` section: the requests, their lengths, and their arrival."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..sched.config import ControlAction
from .fields import Count, Fraction, Positive, Rate, Requests, Section, Several, Switch, bare

Length = Annotated[int, Field(ge=1, le=2**24)]
Real = Annotated[float, Field(ge=1e-6, le=2**24)]


class Fixed(Section):
    dist: Literal["fixed"]
    value: Length


class Uniform(Section):
    """Both ends included."""

    dist: Literal["uniform"]
    min: Length
    max: Length


class Normal(Section):
    """Rounded to whole tokens, then cut to [min, max]."""

    dist: Literal["normal"]
    mean: Real
    std: Real
    min: Length = 1
    max: Length | None = None


class LogNormal(Section):
    """``mean`` and ``std`` are those of the tokens, not of their logarithm."""

    dist: Literal["lognormal"]
    mean: Real
    std: Real
    min: Length = 1
    max: Length | None = None


Distribution = Annotated[
    Fixed | Uniform | Normal | LogNormal, Field(discriminator="dist"), bare("value", int, dist="fixed")
]
"""Of token counts; a bare number is fixed."""


class BurstArrivals(Section):
    """All requests at time zero."""

    process: Literal["burst"]


class ConstantArrivals(Section):
    """Evenly spaced; ``rate`` in requests per second, here and below."""

    process: Literal["constant"]
    rate: Rate


class PoissonArrivals(Section):
    process: Literal["poisson"]
    rate: Rate


class GammaArrivals(Section):
    """Gaps of a gamma distribution whose shape is ``burstiness``: 1 is Poisson, smaller values are burstier."""

    process: Literal["gamma"]
    rate: Rate
    burstiness: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0


class RecordedArrivals(Section):
    """The instants of the trace, ``speed`` times as fast."""

    process: Literal["trace"]
    speed: Rate = 1.0


class ClosedArrivals(Section):
    """``concurrency`` clients, each of which sends its next request when one has ended."""

    process: Literal["closed"]
    concurrency: Positive


Arrival = Annotated[
    BurstArrivals | ConstantArrivals | PoissonArrivals | GammaArrivals | RecordedArrivals | ClosedArrivals,
    Field(discriminator="process"),
    bare("process"),
]


class SharedPrefix(Section):
    """Every prompt begins with the ``tokens`` of one of ``groups`` prefixes, on top of its prompt_tokens."""

    groups: Positive
    tokens: Length


class GrammarSection(Section):
    """Exactly one: a regular expression, or the texts to choose from."""

    regex: str | None = None
    choice: Several[str] = ()


class Sampling(Section):
    """How every request's tokens are chosen. End-of-sequence tokens are ignored by default, so that a
    request has the length that the workload gives it."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_k: Count = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Fraction = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    min_new_tokens: Count = 0
    stop_token_ids: Several[Count] = ()
    ignore_eos: Switch = True
    logprobs: Switch = False
    grammar: GrammarSection | None = None

    @property
    def penalised(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1


class Abort(Section):
    """Clients that disconnect after ``after_tokens`` output tokens: a share of all requests, or those named."""

    fraction: Fraction = 0.0
    requests: Several[str] = ()
    after_tokens: Count = 0


class ScriptedControl(Section):
    """What a client asks of the whole engine before batch number ``at`` of a run is planned. It stops for ``ms``:
    ``pause`` with a result in flight, ``pause_and_settle`` with none, ``pause_and_retract`` without KV of any request.
    ``abort_all`` ends all requests; ``flush`` empties the prefix cache as soon as the engine is idle."""

    action: ControlAction
    at: Count
    ms: Rate | None = None


class WorkloadSection(Section):
    """Drawn from distributions, or the first ``requests`` of a trace. Without ``arrival`` a trace keeps its
    own instants where it has any; everything else is a burst. ``encoder_tokens``: those of an encoder-decoder, in front
    of each prompt."""

    requests: Annotated[Requests, Field(ge=1)] | None = None
    arrival: Arrival | None = None
    prompt_tokens: Distribution | None = None
    output_tokens: Distribution | None = None
    encoder_tokens: Distribution | None = None
    shared_prefix: SharedPrefix | None = None
    sampling: Sampling = Sampling()
    abort: Abort | None = None
    controls: Several[ScriptedControl] = ()
    trace: str | None = None
    format: Literal["mooncake", "azure", "burstgpt", "sharegpt", "jsonl"] | None = None
