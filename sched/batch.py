"""The batch of the scheduler, the batch of the model, and the results of a step.

Field names are upstream's (SGLang ``ScheduleBatch``, ``ForwardBatch``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from .config import SpeculativeConfig
from .observe import StepInfo, StepKind
from .request import Request, Status


class ForwardMode(Enum):
    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"
    TARGET_VERIFY = "target_verify"
    DRAFT = "draft"
    DRAFT_EXTEND = "draft_extend"

    def __init__(self, name: str) -> None:
        self.is_extend = name in ("extend", "mixed")
        self.is_decode = name == "decode"
        self.is_idle = name == "idle"


class FutureIndices(NamedTuple):
    """Where a step's tokens will be on the device once it has run."""

    indices: torch.Tensor  # [b] int64, into the relay's token buffer
    interval: slice | None  # the same as a range, where they are consecutive


class DraftState(NamedTuple):
    """What the draft model has computed behind the last token of each request."""

    topk_p: torch.Tensor  # [b, topk] float32
    topk_index: torch.Tensor  # [b, topk] int64, candidates for the position behind the bonus
    hidden_states: torch.Tensor  # [b, hidden]


@dataclass(slots=True, eq=False)
class DraftFuture:
    """Where the next draft's input will be found, as a batch carries it between two overlapped steps."""

    future_indices: FutureIndices
    verify_done: torch.Event | None = None  # before #25879: behind it the batch's lengths may be read


@dataclass(slots=True, eq=False)
class DraftInput:
    """What the next draft starts from (upstream ``EagleDraftInput``), one row per request."""

    bonus_tokens: torch.Tensor  # [b] int64, the last accepted token: it has no KV yet
    state: DraftState
    new_seq_lens: torch.Tensor | None = None  # [b] int64, of a prompt or an overlapped verify
    gathered_from: DraftFuture | None = None  # keeps the tensors alive that the gathering forward reads


ExtendLens = tuple["torch.Tensor", "torch.Tensor"]
"""New tokens of each request, and tokens before them: [b] int32 each."""


class EncoderTokens(NamedTuple):
    """The encoder's tokens of a prefill, e of all requests together, one request after the other."""

    input_ids: torch.Tensor  # [e] int64, on the host until the forward
    out_cache_loc: torch.Tensor  # [e] int64, KV slots to write
    lens: torch.Tensor  # [b] int64, tokens of the encoder for each request
    decoder_lens: torch.Tensor  # [b] int64, tokens of the decoder


@dataclass(slots=True, eq=False)
class LayerPart:
    """The layers ``start`` to ``stop`` of a forward that is run in parts, and what the next part continues from."""

    start: int
    stop: int
    count: int  # of the whole model
    state: tuple[torch.Tensor, ...] = ()  # hidden and residual [T, hidden], behind the first layers

    @property
    def is_last(self) -> bool:
        return self.stop == self.count

    def advance(self, layers: int) -> None:
        self.start, self.stop = self.stop, min(self.stop + layers, self.count)


@dataclass(slots=True, eq=False)
class ForwardBatch:
    """One forward as the model's input. b = batch_size, T = num_tokens; requests' tokens lie one
    after the other. In decode every request has one token, T == b, and the extend fields are None.

    ``branches`` is for draft trees, in which each token has a row of its own: b == T, ``seq_lens`` counts a token's
    ancestors and itself, and position L + j of token t, L being its prefix, is slot ``branches[t, j]``.
    """

    mode: ForwardMode
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    req_pool_indices: torch.Tensor  # [b] int64, rows of req_to_token
    seq_lens: torch.Tensor  # [b] int64, including the tokens of this forward
    out_cache_loc: torch.Tensor  # [T] int64, KV slots to write
    max_seq_len: int  # host bound on seq_lens
    extend_lens: torch.Tensor | None = None  # [b] int32, new tokens per request
    extend_prefix_lens: torch.Tensor | None = None  # [b] int32, tokens before those
    max_extend_len: int = 1
    sampling_info: Any = None  # the batch's
    # [T] int64, the prompt's token behind each token, where log probabilities of prompts were asked for
    prompt_targets: torch.Tensor | None = None
    capture_hidden: bool = False  # ModelOutput gets every token's hidden state
    branches: torch.Tensor | None = None  # [T, depth] int64
    branch_lens: torch.Tensor | None = None  # [T] int64, how many of them a token sees, its own slot included
    proxies: tuple[torch.Tensor, ...] = ()  # of the stage before: hidden and residual [T, hidden]
    global_num_tokens: tuple[int, ...] = ()  # T of every data-parallel rank, where there are several
    graph_rows: int | None = None  # of the graph that those ranks replay together; 0: none can
    encoder: EncoderTokens | None = None  # of a prefill of an encoder-decoder
    part: LayerPart | None = None  # of a forward in parts

    @property
    def batch_size(self) -> int:
        return self.req_pool_indices.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


_UNSET = object()
ROW_FIELDS = ("req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu", "orig_seq_lens")
"""The tensors of a ScheduleBatch with one row per request."""


@dataclass(slots=True, eq=False)
class ScheduleBatch:
    """The requests of one step and their rows, as the schedule side carries them from step to step.

    Device tensors are written by the schedule stream only; a queued forward may still read an old one, so
    lengths are replaced, never changed, while forwards are in flight. ``*_cpu`` fields are host mirrors: equal
    to the device values wherever schedule code may read them.

    Fields without a default are unset until the batch is prepared: reading one earlier raises AttributeError. The
    optional tensors are None wherever a relay state hands the value on in another way: between steps ``input_ids``
    holds whatever the relay's bridge is (nothing, from #25945 on); before #25774 the bridge is ``output_ids``.
    """

    reqs: list[Request]
    forward_mode: ForwardMode
    step: int = -1
    input_ids: torch.Tensor | None = None  # [T] int64
    output_ids: torch.Tensor | None = None  # [b], only before #25774
    positions: torch.Tensor | None = None  # [T] int64, where the relay makes them with the input
    prefill_input_ids_cpu: torch.Tensor | None = None  # [prompt tokens] int64, on the host
    mix_running_indices: torch.Tensor | None = None  # [running] int64, rows whose token the relay holds
    req_pool_indices: torch.Tensor = field(init=False, repr=False)  # [b] int64
    req_pool_indices_cpu: torch.Tensor = field(init=False, repr=False)  # [b] int64
    seq_lens: torch.Tensor = field(init=False, repr=False)  # [b] int64
    seq_lens_cpu: torch.Tensor = field(init=False, repr=False)  # [b] int64; unset if the device alone has it
    orig_seq_lens: torch.Tensor = field(init=False, repr=False)  # [b] int32
    extend_rows: torch.Tensor | None = None  # [2, b] int32, extend and prefix lengths
    out_cache_loc: torch.Tensor = field(init=False, repr=False)  # [T] int64; unset when rows leave or join
    sampling_info: Any = field(init=False, repr=False)  # the model's SamplingInfo, a row per request
    spec_info: DraftInput | DraftFuture | None = None
    prefix_lens: list[int] = field(default_factory=list)
    extend_lens: list[int] = field(default_factory=list)
    extend_num_tokens: int = 0
    decoding_reqs: list[Request] = field(default_factory=list)  # the running part of a mixed batch
    chunked_req: Request | None = None  # the request whose prompt continues in a later step
    global_num_tokens: tuple[int, ...] = ()  # tokens of this step on every data-parallel rank
    graph_rows: int | None = None  # rows of the graph that those ranks replay together; 0: none can
    batch_is_full: bool = False
    rows_changed: bool = False  # a request joined or left since the last launch
    encoder: EncoderTokens | None = None  # of a prefill of an encoder-decoder
    longest: int = 0  # host bound on the positions that a speculative step touches
    penalised: bool = False  # of a launched batch's record: some request has penalties

    @property
    def batch_size(self) -> int:
        return len(self.reqs)

    @property
    def is_empty(self) -> bool:
        return not self.reqs

    @property
    def num_tokens(self) -> int:
        return self.extend_num_tokens if self.forward_mode.is_extend else len(self.reqs)

    @property
    def draft_input(self) -> DraftInput:
        """``spec_info`` of a batch that can be drafted for."""
        assert isinstance(self.spec_info, DraftInput), f"step {self.step}: the batch has no draft input"
        return self.spec_info

    @property
    def draft_future(self) -> DraftFuture:
        """``spec_info`` of a batch between two overlapped steps."""
        assert isinstance(self.spec_info, DraftFuture), f"step {self.step}: the batch has no draft future"
        return self.spec_info

    @property
    def has_host_lengths(self) -> bool:
        return hasattr(self, "seq_lens_cpu")

    def set_fields(self) -> dict[str, Any]:
        unset = _UNSET
        return {name: value for name in self.__slots__ if (value := getattr(self, name, unset)) is not unset}

    def references(self) -> Sequence[object]:
        """The values of all fields that are set."""
        try:
            values: Sequence[object] = _ALL_FIELDS(self)
        except AttributeError:
            return tuple(self.set_fields().values())
        return values

    def unset(self, *names: str) -> None:
        """Unset these fields, whether or not they are set."""
        for name in names:
            with suppress(AttributeError):
                delattr(self, name)

    def copy(self) -> ScheduleBatch:
        """The host's part of the batch, for settling it one iteration later. The copy keeps no device tensor alive."""
        # In every step: arguments with names take twice as long.
        record = ScheduleBatch(self.reqs.copy(), self.forward_mode, self.step)
        record.extend_num_tokens = self.extend_num_tokens
        record.decoding_reqs = self.decoding_reqs
        record.chunked_req = self.chunked_req
        record.rows_changed = self.rows_changed
        return record

    @staticmethod
    def empty(*, batch_is_full: bool = False) -> ScheduleBatch:
        return ScheduleBatch(reqs=[], forward_mode=ForwardMode.DECODE, batch_is_full=batch_is_full)


# Compiled, since it is asked for in every step.
_ALL_FIELDS: Callable[[ScheduleBatch], Sequence[object]] = eval(
    f"lambda batch: ({', '.join(f'batch.{name}' for name in ScheduleBatch.__slots__)})"
)


@dataclass(slots=True)
class ModelOutput:
    """logits [b, vocab] float32 of each request's last token, of every token in a verify. fingerprint [b] int64 only
    with values none, where the next token follows from the KV tags instead of the logits."""

    logits: torch.Tensor
    fingerprint: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None  # [T, hidden] of every token, where they were asked for
    prompt_logprobs: torch.Tensor | None = None  # [T] float32 of the ``prompt_targets``
    proxies: tuple[torch.Tensor, ...] = ()  # of a stage that is not the last: the next stage's input


class VerifiedTokens(NamedTuple):
    """What a verify gave one request."""

    accepted: int  # tokens that the target accepted
    kept: int  # of them, those up to the request's end
    ending: tuple[Status, str] | None


@dataclass(slots=True, eq=False)
class StepResult:
    """The results of one launch, for settling it one iteration later."""

    # [b] int64 on the device, [b · draft_tokens] of a verify; None while sampling is delayed
    next_token_ids: torch.Tensor | None
    future_indices: FutureIndices  # where the relay keeps them
    next_token_ids_cpu: torch.Tensor | None = None  # pinned, readable after copy_done
    # What requests asked for beside tokens: on the device, or as ``next_token_ids_cpu``, whose copy they share.
    next_token_logprobs: torch.Tensor | None = None  # [b] float32
    prompt_logprobs: torch.Tensor | None = None  # [T] float32
    hidden_states: torch.Tensor | None = None  # [T, hidden]
    spans: list[tuple[int, int]] = field(default_factory=list)  # first position and tokens of each request
    copy_done: torch.Event | None = None
    accept_lens: torch.Tensor | None = None  # [b] int32 of an overlapped verify, where next_token_logprobs is
    draft_tokens: int = 0  # of that verify, per request: where the next one's tokens begin
    next_draft_input: DraftInput | None = None
    verified: list[VerifiedTokens] | None = None  # of a serial verify, which appends the tokens itself
    block_tokens: list[torch.Tensor] | None = None  # of each request, of a step of block diffusion
    embeddings: torch.Tensor | None = None  # [b, hidden] of a batch of prompts without decodes
    delay_sample_func: Callable[[], None] | None = None
    extra_keep_alive_refs: list[object] = field(default_factory=list)


# Under speculation one iteration of the loop is up to three steps, each of its own kind. Their numbers follow the order
# in which the device runs them; the batch's own number is the middle one:
#
#     decode      draft   verify    draft extend
#     prompt              prefill   draft extend
#                 n - 1   n         n + 1
STEP_STRIDE = 3
FIRST_STEP = 1


def draft_step(step: int) -> int:
    return step - 1


def extend_step(step: int) -> int:
    return step + 1


_KINDS: dict[ForwardMode, StepKind] = {
    ForwardMode.EXTEND: "prefill",
    ForwardMode.MIXED: "mixed",
    ForwardMode.DECODE: "decode",
    ForwardMode.IDLE: "idle",
}


def step_infos(batch: ScheduleBatch, spec: SpeculativeConfig | None, *, steady: bool) -> Sequence[StepInfo]:
    """The steps that a batch is announced as: one, or under speculation several in the order of their forwards."""
    size, tokens = batch.batch_size, batch.num_tokens
    if spec is None or batch.forward_mode.is_idle:
        return [StepInfo(batch.step, _KINDS[batch.forward_mode], size, tokens, steady)]
    extend = extend_step(batch.step)
    if batch.forward_mode.is_extend:
        prompt = StepInfo(batch.step, "prefill", size, tokens, steady)
        return [prompt, StepInfo(extend, "draft_extend", size, tokens, steady)]
    tokens = size * spec.draft_tokens
    return [
        StepInfo(draft_step(batch.step), "draft", size, size, steady),
        StepInfo(batch.step, "verify", size, tokens, steady),
        StepInfo(extend, "draft_extend", size, tokens, steady),
    ]
