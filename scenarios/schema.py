"""The scenario file, key by key. Strict: nothing is converted or guessed, unknown keys are errors.

Independent of files, devices and torch. Constraints between keys are in ``checks`` and ``combinations``, messages about
invalid values in ``diagnosis``. Sizes are in tokens unless named otherwise.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Final, Literal

from pydantic import (
    ConfigDict,
    Field,
    GetPydanticSchema,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from ..sched.observe import StepKind, StreamName
from .fields import (
    Count,
    Fraction,
    Limit,
    Positive,
    Ranks,
    Rate,
    Requests,
    Section,
    Seed,
    Setting,
    Several,
    Switch,
    bare,
)
from .problems import ScenarioSource
from .workload_schema import WorkloadSection

Kind = Literal[StepKind, "decode.steady"]
Stream = Literal[StreamName, "link"]
Counter = Literal[
    "h2d",
    "d2h",
    "d2d",
    "memset",
    "send",
    "sync",
    "kernel",
    "h2d_pinned",
    "h2d_pageable",
    "h2d_blocking",
    "d2h_pinned",
    "d2h_pageable",
    "d2h_blocking",
]

# The type checker wants text as the keys of further fields; the validator wants the name of a stream.
_StreamKey = Annotated[str, GetPydanticSchema(lambda _, handler: handler(Stream))]


class Expectation(Section):
    """The budget of a kind of step: by stream, the most that any such step may do. ``when`` has scenario keys with
    values; the budget is not asked of a run with other values."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[_StreamKey, dict[Counter, Count]] = Field(init=False)

    when: dict[str, Setting] | None = None

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if value is not None}


class ModelSection(Section):
    """Exactly one of preset and path. ``path`` is a folder with a Hugging Face checkpoint. ``deeper_scale``, for
    a preset with seeded weights, scales the layers after the first: the smaller, the better a draft predicts."""

    preset: str | None = None
    path: str | None = None
    dtype: Literal["float32", "float64", "bfloat16", "float16", "auto"] = "auto"  # auto: the model's own
    seed: Seed = 0
    deeper_scale: Annotated[float, Field(ge=0, le=1)] | None = None  # None: the preset's own


class DeviceSection(Section):
    hardware: str = "h200"
    values: Literal["real", "none"] = "real"
    host: Literal["modelled", "measured"] = "modelled"


class RelaySection(Section):
    """A state of the ladder, and switches that depart from its defaults. A bare name is a state."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Setting] = Field(init=False)

    state: str = "latest"

    @property
    def switches(self) -> dict[str, bool | int | float | str]:
        return dict(self.__pydantic_extra__)


class AcceptanceSection(Section):
    """Simulated acceptance of draft tokens; ``mean`` includes the bonus token. A number is drawn for each request, or
    for the whole batch as upstream does."""

    mean: Annotated[float, Field(ge=1)]
    method: Literal["match-expected", "multinomial"] = "match-expected"
    per: Literal["request", "batch"] = "request"


class Speculative(Section):
    """``draft`` is a folder with a draft's checkpoint; without one the target's first layer drafts. A bare name is an
    algorithm: ``none`` turns speculation off, whatever the other keys are."""

    algorithm: Literal["none", "eagle"] = "none"
    mode: Literal["v1", "v2"] = "v2"
    steps: Positive = 3
    topk: Positive = 1
    draft_tokens: Positive | None = None  # None: steps + 1, all that a chain has
    draft: str | None = None
    acceptance: Literal["measured"] | AcceptanceSection = "measured"


class Selection(Section):
    """The attended tokens where values are none: the share of a step's tokens that the step before selected too."""

    reuse: Fraction = 0.9


class HiSparse(Section):
    """KV on the host. ``top_k`` is the model's own, ``device_buffer_size`` twice that, unless they are given."""

    enabled: Switch = False
    top_k: Positive | Literal["auto"] = "auto"
    device_buffer_size: Positive | Literal["auto"] = "auto"
    host_ratio: Annotated[float, Field(ge=1, le=1e3)] = 2.0
    selection: Selection = Selection()

    def buffer_size(self, top_k: int) -> int:
        """Tokens of a hot buffer, for a model that selects ``top_k``."""
        return 2 * top_k if self.device_buffer_size == "auto" else self.device_buffer_size


class BlockDiffusion(Section):
    """Requests grow by blocks of ``block_size`` tokens, found in any order: a pass keeps those whose probability
    exceeds ``threshold``, and at least one of each request."""

    enabled: Switch = False
    block_size: Positive = 32
    threshold: Fraction = 0.95


class Pipeline(Section):
    """``async_depth`` microbatches beyond one per stage; ``skip_chunk_outputs`` sends no tokens for a step that
    only has chunks of unfinished prompts. With ``dynamic_chunks`` the later chunks of a prompt get shorter, by the
    share ``smooth_factor`` of the reduction with which they would take as long as the first one."""

    stages: Ranks = 1
    async_depth: Count = 0
    skip_chunk_outputs: Switch = False
    dynamic_chunks: Switch = False
    smooth_factor: Fraction = 0.75


class Disaggregation(Section):
    """``transfer``: auto is local in the virtual world, and distributed where workers are processes.
    ``reserved_decode_tokens``: room that a decode worker keeps for each of its requests before it takes another."""

    mode: Literal["none", "pair"] = "none"
    prefill: Ranks = 1
    decode: Ranks = 1
    transfer: Literal["auto", "local", "distributed", "fake", "nixl"] = "auto"
    reserved_decode_tokens: Count = 512


class DataParallel(Section):
    """Ranks that each have every n-th request, and step together. ``mlp``: each rank has the whole MLP, or a shard."""

    ranks: Ranks = 1
    mlp: Literal["replicated", "shared"] = "replicated"


class EngineSection(Section):
    """Defaults are those of the engine's own configuration; ``auto`` overlaps wherever the modes allow it.
    ``replicas``: engines behind one router, which share nothing. ``deferred``: a result is read
    after the next launch, as upstream's MLX loop does. ``embedding``: a request's result is the hidden state
    of its prompt's last token, whatever its ``output_tokens``."""

    overlap: Switch | Literal["auto"] = "auto"
    relay: Annotated[RelaySection, bare("state")] = RelaySection()
    relays: Several[Annotated[RelaySection, bare("state")]] = ()
    chunked_prefill_size: Limit = 8192
    mixed_chunk: Switch = False
    page_size: Positive = 1
    radix_cache: Switch = True
    policy: Literal["fcfs", "lpm", "lof", "random"] = "fcfs"
    max_running_requests: Positive = 256
    kv_tokens: Positive = 65536
    max_prefill_tokens: Positive = 16384
    schedule_conservativeness: Rate = 1.0
    cuda_graph: Switch = True
    speculative: Annotated[Speculative, bare("algorithm")] = Speculative()
    hisparse: HiSparse = HiSparse()
    pipeline: Pipeline = Pipeline()
    disaggregation: Disaggregation = Disaggregation()
    replicas: Ranks = 1
    deferred: Switch = False
    embedding: Switch = False
    block_diffusion: BlockDiffusion = BlockDiffusion()
    data_parallel: DataParallel = DataParallel()

    @property
    def ranks(self) -> int:
        """Schedulers that one run has, each with a device of its own."""
        pair = self.disaggregation
        if pair.mode != "none":
            return pair.prefill + pair.decode
        return max(self.pipeline.stages, self.data_parallel.ranks, self.replicas)


# The keys of an entry for a rank, and for a link.
OF_RANKS: Final = ("rank", "dies")
OF_LINKS: Final = ("link", "tag", "does", "nth", "ms")

Effect = Literal["stall", "drop", "delay", "repeat", "reorder"]


class Dies(Section):
    """The rank is killed when it enters a phase for the ``nth`` time, or when it sends or has received its message."""

    phase: str
    nth: Positive = 1


class Failure(Section):
    """``rank`` and ``dies``, or ``link`` (from, to), ``tag`` and ``does``. Messages are counted per link and
    tag: ``stall`` holds the nth message and all later ones for ``ms``, or for ever; ``drop`` loses the nth; ``delay``
    delivers it and all later ones ``ms`` later; ``reorder`` delays it and lets the others pass; ``repeat`` delivers it
    twice."""

    rank: str | None = None
    dies: Annotated[Dies | None, bare("phase")] = None
    link: Several[str] = ()
    tag: str | None = None
    does: Effect | None = None
    nth: Positive = 1
    ms: Rate | None = None


class Measure(Section):
    warmup_requests: Requests = 0
    repeat: Positive = 1
    seed: Seed = 0


class Case(Section):
    """A reported change, and what a comparison should find. ``source`` reported ``reported`` of the step from side A to
    side B. The sides are written as for ``compare``; from A to B, ``metric`` should change as ``expect`` says. A run
    ignores this section."""

    source: str
    a: str
    b: str
    expect: Literal["better", "worse", "no change"]
    metric: str
    reported: str


class Scenario(Section):
    """A validated scenario. Made by ``loader.load``."""

    name: str
    about: str = ""
    model: ModelSection
    device: DeviceSection = DeviceSection()
    engine: EngineSection = EngineSection()
    workload: WorkloadSection
    measure: Measure = Measure()
    faults: Several[Failure] = ()
    expect: dict[Kind, Expectation] = Field(default_factory=dict)
    case: Case | None = Field(default=None, exclude=True)  # a run does not depend on it

    _source: ScenarioSource = PrivateAttr(default_factory=ScenarioSource)

    @property
    def source(self) -> ScenarioSource:
        """Where the keys were written, for errors about values that turn out to be impossible later."""
        return self._source

    @property
    def relays(self) -> tuple[RelaySection, ...]:
        """The relays to run, in order: those of a ladder, or a single one."""
        return self.engine.relays or (self.engine.relay,)

    def expanded(self) -> dict[str, Any]:
        """Every key with its value, defaults included, as JSON knows them."""
        return self.model_dump(mode="json")

    @property
    def sha256(self) -> str:
        """Digest of the expanded scenario."""
        text = json.dumps(self.expanded(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()
