"""Frozen configuration of the engine and of one request's sampling.

Independent of scenarios, files and the machine: composing a run resolves those into these records, once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

Policy = Literal["fcfs", "lpm", "lof", "random"]
ControlAction = Literal["pause", "pause_and_settle", "pause_and_retract", "abort_all", "flush"]

# A running request is expected to need at most this many more tokens, whatever its limit is (upstream's constant).
CLIP_MAX_NEW_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen.

    ``temperature == 0`` is greedy. ``top_k == 0`` means the whole vocabulary.
    Penalties follow the OpenAI definitions (frequency, presence: subtracted) and
    CTRL's (repetition: divides positive, multiplies negative logits; arXiv 1909.05858).
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    hidden_states: bool = False
    grammar: tuple[Literal["regex", "choice"], tuple[str, ...]] | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.min_new_tokens > 0
        )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device offers besides kernels, where the scheduler has a slower path for a device without one of them; and
    what its kernels need."""

    pinned_memory: bool = True
    side_streams: bool = True
    events: bool = True
    graphs: bool = True
    first_run: bool = True  # needed by kernels, which it compiles, tunes and gives memory


@dataclass(frozen=True, slots=True)
class HiSparseConfig:
    """KV on the host, with a buffer of ``device_buffer_size`` tokens on the device for each decoding request. All
    requests together may have ``host_ratio`` times the tokens that fit on the device."""

    device_buffer_size: int
    host_ratio: float = 2.0


@dataclass(frozen=True, slots=True)
class SimulatedAcceptance:
    """Draft tokens are accepted at random instead of by the model, so that two variants do the same work.

    ``mean`` counts the bonus token. ``match-expected`` draws one of the two integers around the mean, ``multinomial``
    rounds a normal of deviation 1; both stay within what a verify can accept. ``per`` selects one draw for each request
    of a verify, or one for its whole batch as upstream does.
    """

    mean: float
    method: Literal["match-expected", "multinomial"] = "match-expected"
    per: Literal["request", "batch"] = "request"


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """EAGLE: ``steps`` tokens deep, ``topk`` branches at each depth, ``draft_tokens`` of the tree verified, its root
    (the last accepted token, called bonus) included. With ``topk`` 1 the tree is a chain: draft_tokens = steps + 1.

    ``acceptance`` is None if the target model decides, which changes no output.
    """

    mode: Literal["v1", "v2"]
    steps: int
    topk: int
    draft_tokens: int
    acceptance: SimulatedAcceptance | None = None

    @property
    def drafts(self) -> int:
        """KV slots per request that a draft writes."""
        return self.steps * self.topk

    @property
    def most_accepted(self) -> int:
        """The most tokens that one verify can yield, the next bonus included."""
        return self.steps + 1

    @property
    def alloc_len(self) -> int:
        """The most slots per request that one step writes (upstream ``get_alloc_len_per_decode``)."""
        return max(self.drafts, self.draft_tokens)

    @property
    def overhang(self) -> int:
        """Positions behind a request's last token that may be written to: v2 allocates two steps ahead, and the host
        reads its lengths a step late."""
        return 3 * self.alloc_len


class Division(NamedTuple):
    """How many multiprocessors prompts and decodes have while at least ``from_rows`` requests decode."""

    prefill: int
    decode: int
    from_rows: int


class SplitPrefillConfig(NamedTuple):
    """Prompts run beside decodes, in parts of as many layers as ``token_budget`` allows for their tokens. ``divisions``
    are in the order of their rows; with none the whole GPU runs both."""

    token_budget: int
    divisions: tuple[Division, ...]


class Control(NamedTuple):
    """What a client asks of the whole engine, before the batch number ``at`` of a run is planned."""

    action: ControlAction
    at: int
    pause: int = 0  # ns, where the action pauses


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Block diffusion: blocks of ``size`` tokens, in which ``mask_id``, the vocabulary's last id, stands for a token
    that is not known. A pass keeps the tokens whose probability exceeds ``threshold``."""

    size: int
    threshold: float
    mask_id: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All parameters of the scheduler's decisions. Sizes and limits are in tokens unless named otherwise."""

    device: torch.device
    capabilities: Capabilities
    overlap: bool = True
    chunked_prefill_size: int | None = 8192
    mixed_chunk: bool = False
    page_size: int = 1
    radix_cache: bool = True
    policy: Policy = "fcfs"
    max_running_requests: int = 256
    most_requests: int = sys.maxsize  # that the engine ever has, which bounds the graphs that it captures
    kv_tokens: int = 65536
    context_len: int = 4096
    max_prefill_tokens: int = 16384
    schedule_conservativeness: float = 1.0
    cuda_graph: bool = True
    graph_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
    vocab_size: int = 32000
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    speculative: SpeculativeConfig | None = None
    hisparse: HiSparseConfig | None = None
    stages: int = 1  # of a pipeline, each with this configuration
    blocks: BlockConfig | None = None
    encoder: bool = False  # the model is an encoder-decoder
    deferred: bool = False  # results are read after the next launch
    split_prefill: SplitPrefillConfig | None = None
    embedding: bool = False  # prompts are embedded, and nothing decodes
    controls: tuple[Control, ...] = ()  # by ``at``

    @property
    def running_limit(self) -> int:
        """The most requests that decode in one batch: a pipeline's microbatches share ``max_running_requests``."""
        return max(1, self.max_running_requests // self.stages)

    @property
    def logical_tokens(self) -> int:
        """Tokens that the page table can address, in whole pages: more than ``kv_tokens`` only if KV is on the host."""
        if self.hisparse is None:
            return self.kv_tokens
        return int(self.kv_tokens * self.hisparse.host_ratio) // self.page_size * self.page_size
