"""The scenario file, key by key. Strict: nothing is converted or guessed, unknown keys are errors.

Independent of files, devices and torch. Constraints between keys are in ``checks`` and ``combinations``, messages about
invalid values in ``diagnosis``. Sizes are in tokens unless named otherwise.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    ConfigDict,
    Field,
    GetPydanticSchema,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from ..sched.observe import StepKind, StreamName
from ..sched.relay.names import ALIASES, STATE_NAMES
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
from .problems import KeyPath, ScenarioSource, unknown
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

_OWN_STATE: Final = re.compile(r"(.+\.py):(\w+)")
# The keys of further fields: text for the type checker, the name of a stream for the validator.
_StreamKey = Annotated[str, GetPydanticSchema(lambda _, handler: handler(Stream))]


class Expectation(Section):
    """The budget of a kind of step: by stream, the most that any such step may do. ``when`` has scenario keys with
    values; the budget is not asked of a run with other values."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[_StreamKey, dict[Counter, Count]] = Field(init=False)

    when: dict[str, Setting] | None = None
    """Scenario keys with values; the budget is not asked of a run with other values."""

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if value is not None}


class ModelSection(Section):
    """Exactly one of preset and path."""

    preset: str | None = None
    """A shape with seeded weights; `schedbench list models`."""
    path: str | None = None
    """A folder with a Hugging Face checkpoint, instead of a preset."""
    dtype: Literal["float32", "float64", "bfloat16", "float16", "auto"] = "auto"
    """The type of weights and activations; auto is the model's own."""
    seed: Seed = 0
    """The seed of a preset's weights."""
    deeper_scale: Annotated[float, Field(ge=0, le=1)] | None = None
    """Scales the layers after the first of a preset: the smaller, the better a draft predicts."""


class DeviceSection(Section):
    hardware: str = "h200"
    """The hardware profile of the virtual GPU: a name of `schedbench list hardware`, or a file."""
    values: Literal["real", "none"] = "real"
    """none skips floating-point work; tokens then follow from tags in the KV cache."""
    host: Literal["modelled", "measured"] = "modelled"
    """measured advances the host's clock by the time that the scheduler's Python takes on this machine."""


class RelaySection(Section):
    """A state of the ladder, and switches that depart from its defaults. A bare name is a state."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Setting] = Field(init=False)

    state: str = "latest"
    """A state of `schedbench list relays`, or one of your own: FILE.py:NAME."""

    @field_validator("state")
    @classmethod
    def _named(cls, state: str) -> str:
        names = (*STATE_NAMES, *ALIASES)
        if state in names or _OWN_STATE.fullmatch(state):
            return state
        message = unknown("relay state", state, names)
        if state.endswith(".py"):
            message = "names a file without the state in it: expected FILE.py:NAME"
        raise PydanticCustomError("name", "{message}", {"message": message})

    @property
    def own(self) -> tuple[str, str] | None:
        """File and name of a state of the user's own; None for a state of the ladder."""
        found = _OWN_STATE.fullmatch(self.state)
        return None if found is None else (found[1], found[2])

    @property
    def switches(self) -> dict[str, bool | int | float | str]:
        return dict(self.__pydantic_extra__)


class AcceptanceSection(Section):
    """Simulated acceptance of draft tokens."""

    mean: Annotated[float, Field(ge=1)]
    """Accepted tokens per verify, the bonus token included."""
    method: Literal["match-expected", "multinomial"] = "match-expected"
    """How the number is drawn."""
    per: Literal["request", "batch"] = "request"
    """Whether it is drawn for each request, or for the whole batch as upstream does."""


class Speculative(Section):
    """Speculative decoding. A bare name is an algorithm."""

    algorithm: Literal["none", "eagle"] = "none"
    """none turns speculation off, whatever the other keys are."""
    mode: Literal["v1", "v2"] = "v2"
    """The worker; v1 runs in the serial loop only."""
    steps: Positive = 3
    """Draft steps after each token."""
    topk: Positive = 1
    """Branches of the draft tree at each step."""
    draft_tokens: Positive | None = None
    """Tokens that are verified at once; by default steps + 1, all that a chain has."""
    draft: str | None = None
    """A folder with a draft's checkpoint; by default the target's first layer drafts."""
    acceptance: Literal["measured"] | AcceptanceSection = "measured"
    """Measured from the tokens, or simulated."""


class Selection(Section):
    """The attended tokens where values are none."""

    reuse: Fraction = 0.9
    """The share of a step's attended tokens that the step before attended to as well."""


class HiSparse(Section):
    """KV on the host."""

    enabled: Switch = False
    """Whether KV is kept on the host."""
    top_k: Positive | Literal["auto"] = "auto"
    """Tokens that a step attends to; auto is the model's own number."""
    device_buffer_size: Positive | Literal["auto"] = "auto"
    """Tokens of a request's hot buffer on the device; auto is twice top_k."""
    host_ratio: Annotated[float, Field(ge=1, le=1e3)] = 2.0
    """Room for KV on the host, as a multiple of that on the device."""
    selection: Selection = Selection()
    """The attended tokens where values are none."""

    def buffer_size(self, top_k: int) -> int:
        """Tokens of a hot buffer, for a model that selects ``top_k``."""
        return 2 * top_k if self.device_buffer_size == "auto" else self.device_buffer_size


class BlockDiffusion(Section):
    """Requests grow by blocks of ``block_size`` tokens, found in any order: a pass keeps those whose probability
    exceeds ``threshold``, and at least one of each request."""

    enabled: Switch = False
    """Whether outputs are decoded block by block."""
    block_size: Positive = 32
    """Tokens of a block."""
    threshold: Fraction = 0.95
    """The probability above which a pass keeps a token."""


class Pipeline(Section):
    """Pipeline stages."""

    stages: Ranks = 1
    """Ranks that each have a part of the layers."""
    async_depth: Count = 0
    """Microbatches in flight beyond one per stage."""
    skip_chunk_outputs: Switch = False
    """Whether a step that only has chunks of unfinished prompts sends no tokens."""
    dynamic_chunks: Switch = False
    """Whether later chunks of a prompt get shorter."""
    smooth_factor: Fraction = 0.75
    """The share of the reduction with which later chunks would take as long as the first one."""


class Disaggregation(Section):
    """Separate workers for prompts and decodes."""

    mode: Literal["none", "pair"] = "none"
    """pair: separate workers for prompts and decodes."""
    prefill: Ranks = 1
    """The number of prefill workers."""
    decode: Ranks = 1
    """The number of decode workers."""
    transfer: Literal["auto", "local", "distributed", "fake", "nixl"] = "auto"
    """How KV travels; auto is local in the virtual world, and distributed where workers are processes."""
    reserved_decode_tokens: Count = 512
    """Room that a decode worker keeps for each of its requests before it takes another."""


class DataParallel(Section):
    """Data-parallel ranks."""

    ranks: Ranks = 1
    """Ranks that each have every n-th request, and step together."""
    mlp: Literal["replicated", "shared"] = "replicated"
    """Whether each rank has the whole MLP, or a shard."""


class DivisionSection(Section):
    """How the GPU is divided while prompts and decodes run side by side."""

    prefill: Positive
    """Multiprocessors of prompts."""
    decode: Positive
    """Multiprocessors of decodes."""
    from_rows: Positive = 1
    """The division holds while at least so many requests decode, up to the next one's number."""


class SplitPrefill(Section):
    """Prompts that run in parts beside decodes, as in upstream's multiplexing of prefill and decode."""

    enabled: Switch = False
    """Whether they do."""
    token_budget: Positive = 65536
    """Tokens times layers of one part of a prompt; a part has one layer at least."""
    divisions: Several[DivisionSection] = ()
    """Shares of the GPU; without any, both run on the whole GPU."""


class EngineSection(Section):
    """The scheduler. Defaults are those of its own configuration."""

    overlap: Switch | Literal["auto"] = "auto"
    """Whether the schedule of a step runs during the forward of the step before; auto: wherever the modes allow it."""
    relay: Annotated[RelaySection, bare("state")] = RelaySection()
    """What one step hands to the next, and how: a state and switches; a bare name is a state."""
    relays: Several[Annotated[RelaySection, bare("state")]] = ()
    """Several relays, of which run makes one table, instead of one."""
    chunked_prefill_size: Limit = 8192
    """Tokens of a prompt that one step prefills at most; none: whole prompts."""
    mixed_chunk: Switch = False
    """Whether a chunk of a prompt and running decodes share a step."""
    page_size: Positive = 1
    """Tokens of a page of KV."""
    radix_cache: Switch = True
    """Whether KV of equal prefixes is shared."""
    policy: Literal["fcfs", "lpm", "lof", "random"] = "fcfs"
    """The order of waiting requests: first come, longest prefix match, longest output, or random."""
    max_running_requests: Positive = 256
    """Requests that run at once at most."""
    kv_tokens: Positive = 65536
    """Tokens whose KV fits on the device."""
    max_prefill_tokens: Positive = 16384
    """Tokens that one step prefills at most, over all prompts."""
    schedule_conservativeness: Rate = 1.0
    """The share of their possible length that running requests are expected to need; larger admits later."""
    cuda_graph: Switch = True
    """Whether decodes are replayed as CUDA graphs."""
    model_runner: Literal["stub", "own"] = "stub"
    """What prepares the forwards of another project's engine: own is its model runner, with its attention metadata and
    graphs, where only the model is replaced; stub replaces SGLang's runner, too."""
    speculative: Annotated[Speculative, bare("algorithm")] = Speculative()
    """Speculative decoding; a bare name is an algorithm."""
    hisparse: HiSparse = HiSparse()
    """Sparse attention with KV on the host."""
    pipeline: Pipeline = Pipeline()
    """Pipeline stages."""
    disaggregation: Disaggregation = Disaggregation()
    """Separate workers for prompts and decodes."""
    replicas: Ranks = 1
    """Engines behind one router, which share nothing."""
    deferred: Switch = False
    """Whether a result is read after the next launch, as upstream's MLX loop does."""
    split_prefill: SplitPrefill = SplitPrefill()
    """Prompts that run in parts beside decodes, each on a share of the GPU."""
    embedding: Switch = False
    """Whether a request's result is the hidden state of its prompt's last token, whatever its output_tokens."""
    block_diffusion: BlockDiffusion = BlockDiffusion()
    """Decoding by diffusion of blocks of tokens."""
    data_parallel: DataParallel = DataParallel()
    """Data-parallel ranks that step together."""

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


class Dies(Section):
    """The rank is killed when it enters a phase for the ``nth`` time, or when it sends or has received its message."""

    phase: str
    """The phase at whose beginning the rank is killed, or the message that it has sent or received."""
    nth: Positive = 1
    """The number of that time, from 1."""


class Failure(Section):
    """``rank`` and ``dies``, or ``link`` (from, to), ``tag`` and ``does``. Messages are counted per link and
    tag: ``stall`` holds the nth message and all later ones for ``ms``, or for ever; ``drop`` loses the nth; ``delay``
    delivers it and all later ones ``ms`` later; ``reorder`` delays it and lets the others pass; ``repeat`` delivers it
    twice."""

    rank: str | None = None
    """The rank that dies."""
    dies: Annotated[Dies | None, bare("phase")] = None
    """When it dies; a bare name is a phase."""
    link: Several[str] = ()
    """The ranks at the two ends of a link, from and to."""
    tag: str | None = None
    """The kind of message."""
    does: Literal["stall", "drop", "delay", "repeat", "reorder"] | None = None
    """What happens to messages."""
    nth: Positive = 1
    """The number of the message from which, or to which, it happens."""
    ms: Rate | None = None
    """For how long; without it, for ever."""


class Measure(Section):
    warmup_requests: Requests = 0
    """Requests before the measured ones, which are neither observed nor aborted."""
    repeat: Positive = 1
    """Passes of run and sweep, where times are measured; metrics are their median. compare has --pairs."""
    seed: Seed = 0
    """The seed of the workload."""


class Case(Section):
    """A reported change, and what a comparison should find. ``source`` reported ``reported`` of the step from side A to
    side B. The sides are written as for ``compare``; from A to B, ``metric`` should change as ``expect`` says. A run
    ignores this section."""

    source: str
    """Who reported the change."""
    a: str
    """Side A of the comparison."""
    b: str
    """Side B."""
    expect: Literal["better", "worse", "no change"]
    """How the metric should change from A to B."""
    metric: str
    """A metric of `schedbench explain`."""
    reported: str
    """What was reported."""


class Scenario(Section):
    """A validated scenario. Made by ``loader.load``."""

    name: str
    """The name in results."""
    about: str = ""
    """A sentence about the scenario."""
    model: ModelSection
    """Which model runs: the shape of a preset, or a checkpoint."""
    device: DeviceSection = DeviceSection()
    """What the model runs on, and whether its values are computed."""
    engine: EngineSection = EngineSection()
    """How the scheduler works: its loop, its relay, its limits and modes."""
    workload: WorkloadSection
    """How many requests there are, when they arrive, and how long they are."""
    measure: Measure = Measure()
    """What is repeated, and the seed."""
    faults: Several[Failure] = ()
    """Scripted failures of ranks and links (failures.md)."""
    expect: dict[Kind, Expectation] = Field(default_factory=dict)
    """Budgets by kind of step: by stream and counter, the most that any such step may do."""
    case: Case | None = Field(default=None, exclude=True)  # a run does not depend on it
    """A reported change, as two sides of compare; a run ignores it."""

    _source: ScenarioSource = PrivateAttr(default_factory=ScenarioSource)

    @property
    def source(self) -> ScenarioSource:
        """Where the keys were written, for errors about values that turn out to be impossible later."""
        return self._source

    def file(self, *key: str) -> Path | None:
        """The file or folder that the value at ``key`` names; None where there is no value."""
        text = reduce(getattr, key, self)
        return None if text is None else self._source.locate(key, str(text))

    @property
    def relays(self) -> dict[KeyPath, RelaySection]:
        """The relays to run, in order, by their keys: those of a ladder, or a single one."""
        return {("engine", "relays", place): relay for place, relay in enumerate(self.engine.relays)} or {
            ("engine", "relay"): self.engine.relay
        }

    def expanded(self) -> dict[str, Any]:
        """Every key with its value, defaults included, as values of JSON."""
        return self.model_dump(mode="json")

    @property
    def sha256(self) -> str:
        """Digest of the expanded scenario."""
        text = json.dumps(self.expanded(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()
