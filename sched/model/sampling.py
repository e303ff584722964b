"""The sampling state of a batch (upstream's SamplingBatchInfo), which is parameters, penalties and grammar mask of each
row; and the next tokens that are sampled with it from a forward's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch

from ..batch import ModelOutput, ScheduleBatch
from ..config import EngineConfig, SamplingParams
from ..kernels.sampling import (
    Draw,
    row_seed,
    sample,
    sample_greedy,
    sample_greedy_tagged,
    sample_tagged,
    score_tokens,
)
from ..request import Request
from .grammar import GrammarState, vocab_mask_words
from .penalties import AccumulatedPenalties, PenalizerOrchestrator
from .upload import Upload, upload

T = TypeVar("T")

_ROW = np.dtype(
    [("seed", "<i8"), ("temperature", "<f4"), ("top_p", "<f4"), ("top_k", "<i4"), ("min_p", "<f4")]
)
_WORDS = _ROW.itemsize // 4


class SamplingTensors(NamedTuple):
    """Parameters on the device, one row per request."""

    temperatures: torch.Tensor  # [b, 1] float32, 0 for greedy rows
    top_ps: torch.Tensor  # [b] float32
    top_ks: torch.Tensor  # [b] int32, the vocabulary's size for no limit
    min_ps: torch.Tensor  # [b] float32
    sampling_seeds: torch.Tensor  # [b] int64


class SamplingNeeds(NamedTuple):
    """What at least one row of a batch needs; ``greedy`` if all rows are."""

    greedy: bool
    filters: bool  # a row that is not greedy has a top-k, top-p or min-p
    grammar: bool
    logprobs: bool
    prompt_logprobs: bool
    hidden_states: bool
    penalties: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], grammars: Sequence[GrammarState | None]) -> SamplingNeeds:
        drawn = [p for p in params if not p.greedy]
        return cls(
            greedy=not drawn,
            filters=any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in drawn),
            grammar=any(grammar is not None for grammar in grammars),
            logprobs=any(p.logprobs for p in params),
            prompt_logprobs=any(p.prompt_logprobs for p in params),
            hidden_states=any(p.hidden_states for p in params),
            penalties=any(p.penalised for p in params),
        )


@dataclass(slots=True, eq=False)
class SamplingInfo:
    """Rows follow the batch by ``filter`` and ``merge``, which replace device tensors and do not change the old ones.
    ``vocab_mask`` belongs to one step: ``update_vocab_mask`` sets it, ``filter`` and ``merge`` drop it.
    """

    config: EngineConfig
    params: tuple[SamplingParams, ...]
    grammars: tuple[GrammarState | None, ...]
    rows: tuple[torch.Tensor, ...]  # SamplingTensors, or one [b, 6] int32 that holds them all
    penalizer_orchestrator: PenalizerOrchestrator | None
    acc_penalties: AccumulatedPenalties | None = None
    vocab_mask: torch.Tensor | None = None  # [b, ceil(vocab / 32)] int32
    _needs: SamplingNeeds | None = None  # computed on first use, reset when rows change

    @classmethod
    def from_requests(
        cls,
        requests: Sequence[Request],
        *,
        config: EngineConfig,
        how: Upload = "pageable",
        exact: bool = False,
        rows: torch.Tensor | None = None,
    ) -> Self:
        """Upload the parameters of ``requests``: five copies, or one where ``how`` is "packed", or none where ``rows``
        [b, 6] int32 contains them in packed form; and those of the penalizers that they need. ``exact`` is as in
        ``PenalizerOrchestrator``. Without pinned memory every upload is pageable."""
        how = how if config.capabilities.pinned_memory else "pageable"
        return cls(
            config,
            tuple(req.sampling for req in requests),
            tuple(req.grammar for req in requests),
            _uploaded(host_rows(requests, config), config.device, how) if rows is None else (rows,),
            PenalizerOrchestrator.from_requests(requests, config=config, how=how, exact=exact),
        )

    @classmethod
    def empty(cls, config: EngineConfig) -> Self:
        """The state of a batch without rows: nothing is uploaded."""
        rows = torch.empty((0, _WORDS), dtype=torch.int32, device=config.device)
        return cls(config, (), (), (rows,), None)

    @property
    def needs(self) -> SamplingNeeds:
        if self._needs is None:
            self._needs = SamplingNeeds.of(self.params, self.grammars)
        return self._needs

    @property
    def tensors(self) -> SamplingTensors:
        return SamplingTensors(*self.rows) if len(self.rows) > 1 else unpacked(self.rows[0])

    def filter(self, keep: Sequence[int], keep_device: torch.Tensor) -> None:
        self.params = tuple(self.params[i] for i in keep)
        self.grammars = tuple(self.grammars[i] for i in keep)
        self.rows = tuple(row.index_select(0, keep_device) for row in self.rows)
        if self.penalizer_orchestrator is not None:
            self.penalizer_orchestrator.filter(keep, keep_device)
        self.vocab_mask = self._needs = None

    def merge(self, other: Self) -> None:
        # Penalizers are merged first: a side without one builds neutral rows from its own requests.
        if self.penalizer_orchestrator is not None and other.penalizer_orchestrator is not None:
            self.penalizer_orchestrator.merge(other.penalizer_orchestrator)
        self.params += other.params
        self.grammars += other.grammars
        self.rows = tuple(torch.cat(pair) for pair in zip(self.rows, other.rows, strict=True))
        self.vocab_mask = self._needs = None

    def copy_for_forward(self) -> Self:
        """The state that one forward samples with, while the batch may change.

        Upstream's penalties are accumulated now, and the copy has no orchestrator. Exact penalties are kept by the
        copy, which counts the tokens that it samples, and need no tensors of their own. Without penalties the copy has
        neither.
        """
        orchestrator, accumulated = self.penalizer_orchestrator, self.acc_penalties
        if orchestrator is not None and not orchestrator.is_required:
            orchestrator = None
        elif orchestrator is not None:
            accumulated = accumulated if orchestrator.exact else orchestrator.accumulate()
            orchestrator = orchestrator.copy() if orchestrator.exact else None
        kept = (self.config, self.params, self.grammars, self.rows)  # faster than ``replace``
        return type(self)(*kept, orchestrator, accumulated, self.vocab_mask, self._needs)

    def for_drafts(self, each: int, paths: torch.Tensor | None, vocab_mask: torch.Tensor | None) -> Self:
        """The state that a verify samples ``each`` drafts of every request with. ``paths`` [b · each, depth] is each
        draft's history, given if penalties are exact; otherwise drafts are independent of each other."""
        orchestrator = self.penalizer_orchestrator
        accumulated = self.acc_penalties
        along = None
        is_read = not self.needs.greedy or self.needs.logprobs
        if orchestrator is not None and paths is not None:
            along = orchestrator.along(paths)
        elif orchestrator is not None and orchestrator.is_required:
            accumulated = orchestrator.accumulate()
        return replace(
            self,
            params=_repeated(self.params, each),
            grammars=_repeated(self.grammars, each),
            rows=tuple(row.repeat_interleave(each, 0) for row in self.rows) if is_read else self.rows,
            penalizer_orchestrator=along,
            acc_penalties=None if accumulated is None else accumulated.repeated(each),
            vocab_mask=vocab_mask,
            _needs=self.needs,
        )

    def apply_penalties(self, logits: torch.Tensor) -> None:
        """Penalise logits [b, vocab] in place."""
        if self.acc_penalties is not None:
            self.acc_penalties.apply(logits)
        if self.penalizer_orchestrator is not None:
            self.penalizer_orchestrator.apply(logits)

    def update_vocab_mask(self) -> None:
        """Set the mask of the grammars' current states, by one H2D on the current stream from a new pinned buffer, or a
        blocking one without pinned memory. Without a grammar there is no mask."""
        self.vocab_mask = None
        if not self.needs.grammar:
            return
        pinned = self.config.capabilities.pinned_memory
        shape = (len(self.grammars), vocab_mask_words(self.config.vocab_size))
        mask = torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned)
        for row, grammar in zip(mask.numpy(), self.grammars, strict=True):
            if grammar is not None:
                grammar.fill_vocab_mask(row)
        self.vocab_mask = mask.to(self.config.device, non_blocking=pinned)


def sampling_of(batch: ScheduleBatch) -> SamplingInfo:
    info = batch.sampling_info
    assert isinstance(info, SamplingInfo), "a batch with rows has sampling state"
    return info


def host_rows(requests: Sequence[Request], config: EngineConfig) -> np.ndarray[Any, np.dtype[np.void]]:
    """One record per request, in the layout of packed rows."""
    limit = config.vocab_size  # of a request without top-k, too
    rows = [
        (row_seed(config.seed, req.index), p.temperature, p.top_p, min(p.top_k or limit, limit), p.min_p)
        for req in requests
        for p in (req.sampling,)
    ]
    return np.array(rows, _ROW)


def _uploaded(
    host: np.ndarray[Any, np.dtype[np.void]], device: torch.device, how: Upload
) -> tuple[torch.Tensor, ...]:
    if how == "packed":
        return tuple(upload([packed_words(host)], device=device, how=how))
    if how == "pageable":
        return _pageable(host, device)
    temperatures = _column(host, "temperature").reshape(-1, 1)
    columns = [_column(host, name) for name in ("top_p", "top_k", "min_p", "seed")]
    return SamplingTensors(*upload([temperatures, *columns], device=device, how=how))


def _pageable(host: np.ndarray[Any, np.dtype[np.void]], device: torch.device) -> SamplingTensors:
    """Five blocking copies, each in a statement of its own, so that each has its own source line in reports."""
    temperatures = torch.tensor(_column(host, "temperature").reshape(-1, 1), device=device)
    top_ps = torch.tensor(_column(host, "top_p"), device=device)
    top_ks = torch.tensor(_column(host, "top_k"), device=device)
    min_ps = torch.tensor(_column(host, "min_p"), device=device)
    sampling_seeds = torch.tensor(_column(host, "seed"), device=device)
    return SamplingTensors(temperatures, top_ps, top_ks, min_ps, sampling_seeds)


def _column(host: np.ndarray[Any, np.dtype[np.void]], name: str) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(host[name])


def _repeated(items: Sequence[T], each: int) -> tuple[T, ...]:
    return tuple(item for item in items for _ in range(each))


def packed_words(host: np.ndarray[Any, np.dtype[np.void]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[b, 6] int32: two words of seed, then one each of temperature, top_p, top_k and min_p."""
    return host.view(np.int32).reshape(len(host), _WORDS)


def unpacked(words: torch.Tensor) -> SamplingTensors:
    """Views of ``packed_words`` on the device."""
    return SamplingTensors(
        temperatures=words[:, 2:3].view(torch.float32),
        top_ps=words[:, 3].view(torch.float32),
        top_ks=words[:, 4],
        min_ps=words[:, 5].view(torch.float32),
        sampling_seeds=words[:, :2].view(torch.int64).squeeze(1),
    )


class TokenScores(NamedTuple):
    """[b] float32 each; see ``kernels.sampling.score_tokens``."""

    logprobs: torch.Tensor
    margins: torch.Tensor


class Sampler:
    """Applies penalties and the vocabulary mask, and samples by one kernel. With a fingerprint kernels of the same cost
    are used that read no logits."""

    def sample(self, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor) -> torch.Tensor:
        """Next token ids [b] int64; seq_lens [b] is the position that each token will take. Penalties change
        ``output.logits`` in place."""
        info.apply_penalties(output.logits)
        greedy = info.needs.greedy
        rows = (output.logits, info.vocab_mask) if greedy else _draw(output, info, seq_lens)
        if output.fingerprint is None:
            return (sample_greedy if greedy else sample)(*rows)
        return (sample_greedy_tagged if greedy else sample_tagged)(*rows, output.fingerprint)

    def score(
        self, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor, ids: torch.Tensor
    ) -> TokenScores:
        """Scores of the ``ids`` that ``sample`` has just returned for the same arguments, by one more launch."""
        return TokenScores(*score_tokens(*_draw(output, info, seq_lens), ids))


def _draw(output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor) -> Draw:
    temperatures, top_ps, top_ks, min_ps, seeds = info.tensors
    limits = (temperatures, top_ks, top_ps, min_ps)
    return Draw(output.logits, *limits, seeds, seq_lens, info.vocab_mask, info.needs.filters)
