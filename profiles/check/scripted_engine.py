"""An engine whose batches follow a script, with the inputs of each step checked.

All parts of the engine are real except for the model, whose next token follows from the request and the position, so
that the right input of every later step is known.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...sched.batch import ForwardBatch, ModelOutput, ScheduleBatch, StepResult
from ...sched.config import Capabilities, EngineConfig, SamplingParams, SpeculativeConfig
from ...sched.loop.engine import Engine
from ...sched.loop.launch import launch_step
from ...sched.loop.prepare import (
    filter_rows,
    idle_batch,
    merge_rows,
    mix_with_running,
    prepare_for_decode,
    prepare_for_extend,
)
from ...sched.loop.settle import settle_verify
from ...sched.loop.speculative import launch_drafts
from ...sched.memory.allocation import release_kv_cache
from ...sched.memory.cache import ChunkCache
from ...sched.memory.invariants import unchanged
from ...sched.memory.pools import KVAllocator, ReqToTokenPool
from ...sched.memory.tier import KVTier
from ...sched.model.sampling import Sampler
from ...sched.observe import LogicalClock, Observer
from ...sched.relay.row import Relay, RelayRow
from ...sched.request import Request, Status
from ...sched.speculate.verifier import TargetAcceptance
from ...sched.speculate.worker import Worker
from ...sched.streams import Streams
from .batch_invariants import (
    Forward,
    Violation,
    checking_allocation,
    forward_violations,
    mirrors,
    row_counts,
)
from .draft_invariants import DraftWatch
from .scripted_drafts import (
    VOCABULARY,
    DraftSetup,
    ScriptedDrafter,
    ScriptedVerifier,
    prompt_states,
    token_of,
)

ROWS = 8
CHUNK = 16
LOGIT = 10.0  # of the next token; penalties do not change which token has the largest
CONFIG = EngineConfig(
    device=torch.device("cpu"),
    capabilities=Capabilities(pinned_memory=False, side_streams=False, events=False, graphs=False),
    chunked_prefill_size=CHUNK,
    mixed_chunk=True,
    max_running_requests=ROWS,
    kv_tokens=1024,
    context_len=4 * CHUNK,
    vocab_size=VOCABULARY,
    cuda_graph=False,
)


class ScriptedEngine:
    """``running`` is the decoding batch, ``last`` the prefilled one that has not joined it, ``found`` the violations so
    far. A request ends when its tokens would no longer fit its row."""

    def __init__(self, row: RelayRow, *, overlap: bool, drafts: DraftSetup | None = None) -> None:
        self.found: list[Violation] = []
        self.running = ScheduleBatch.empty()
        self.last: ScheduleBatch | None = None
        self._drafts = drafts
        checked = checking_allocation(row, unchanged, self.found.extend)
        self.engine = _engine(checked, self, overlap=overlap, drafts=drafts)
        # The overlapped worker's batch has the lengths of its last verify, or sentinels.
        self._settled = drafts is None or drafts.mode == "v1"
        self._under_way: Request | None = None
        self._unsettled: list[tuple[ScheduleBatch, StepResult]] = []
        self._launching = self.running
        self._steps = self._made = 0

    @property
    def free_rows(self) -> int:
        return self.engine.slots.available_size()

    # ---- actions of a script -------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill as many of the prompts as there are free rows."""
        self.join()
        reqs = [self._started(self._request(prompt)) for prompt in prompts[: self.free_rows]]
        if reqs:
            self.last = prepare_for_extend(self.engine, reqs, self._steps)
            self._launch(self.last)

    def chunks(self, prompt: Sequence[int]) -> None:
        """Prefill a long prompt in chunks, one per step."""
        if not self.free_rows:
            return
        self._under_way = req = self._request(prompt)
        while self._under_way is not None:
            self.join()
            self._started(req)
            req.fill_len = min(req.prefix_len + CHUNK, req.seqlen)
            req.extend_input_len = req.fill_len - (
                0 if req.prefix_indices is None else len(req.prefix_indices)
            )
            self.last = prepare_for_extend(self.engine, [req], self._steps)
            self._launch(self.last)
            if req.fill_len == req.seqlen:
                self._under_way = None

    def decode(self) -> None:
        self.join()
        filter_rows(self.engine, self.running)
        if not self.running.is_empty:
            prepare_for_decode(self.engine, self.running, self._steps)
            self._launch(self.running)

    def idle(self) -> None:
        """A step without requests, while others run."""
        self.join()
        self._launch(idle_batch(self.engine, self._steps))

    def mix(self, prompts: Sequence[Sequence[int]]) -> None:
        """One step with new prompts and the decodes of the running requests."""
        self.join()
        filter_rows(self.engine, self.running)
        reqs = [self._started(self._request(prompt)) for prompt in prompts[: self.free_rows]]
        if not reqs or self.running.is_empty:
            return
        self.last = prepare_for_extend(self.engine, reqs, self._steps)
        prepare_for_decode(self.engine, self.running, self._steps)
        mix_with_running(self.engine, self.last, self.running)
        self.running = ScheduleBatch.empty()
        self._launch(self.last)

    def leave(self, places: Sequence[int]) -> None:
        """End some of the requests that run or were just prefilled."""
        alive = [
            req
            for batch in (self.running, self.last)
            if batch is not None
            for req in batch.reqs
            if req.status is Status.RUNNING and req is not self._under_way
        ]
        for place in {place % len(alive) for place in places} if alive else ():
            self._end(alive[place])
        self._check_batches()

    def retract(self, order: Sequence[int]) -> None:
        """Keep the running requests at these places, in that order; the others lose their KV."""
        self.join()
        filter_rows(self.engine, self.running)
        size = self.running.batch_size
        keep = list(dict.fromkeys(place % size for place in order)) if size else []
        if not keep or len(keep) == size:
            return
        for place in set(range(size)) - set(keep):
            self._end(self.running.reqs[place])
        filter_rows(self.engine, self.running, keep=keep)
        self._check_batches()

    def join(self) -> None:
        """Merge the batch that was prefilled last into the running one."""
        engine, last = self.engine, self.last
        self.last = None
        under_way = self._under_way
        if under_way is not None and under_way.req_pool_idx is not None:
            engine.cache.cache_unfinished_req(under_way)
        if last is None:
            return
        filter_rows(engine, last, without=() if under_way is None else (under_way,))
        if not engine.relay.joins(last):
            return
        if self.running.is_empty:
            self.running = last
        else:
            merge_rows(engine, self.running, last)
        self._check_batches()

    # ---- parts of the engine ---------------------------------------------------------------------------

    def forward(self, view: ForwardBatch) -> ModelOutput:
        context = self.engine.relay.context
        batch = self._launching
        odd = list(row_counts(batch, f"the batch of step {batch.step}"))
        forward = Forward(batch, view, context.config, context.pages, unchanged)
        self.found += odd or [*forward_violations(forward), *_misfed(forward)]
        next_ids = [token_of(req, req.kv_committed_len) for req in batch.reqs]
        logits = torch.nn.functional.one_hot(torch.tensor(next_ids, dtype=torch.int64), VOCABULARY)
        states = prompt_states(batch) if view.capture_hidden else None
        return ModelOutput(LOGIT * logits.to(torch.float32), hidden_states=states)

    def worker(self, spec: SpeculativeConfig) -> Worker:
        """A worker without models, whose drafts are checked."""
        made = ScriptedDrafter(lambda: self._launching, self.found.append)
        watch = DraftWatch(made, unchanged, lambda: self._launching, lambda *_: None, self.found.extend)
        accepts = TargetAcceptance(spec.most_accepted)
        return Worker(spec, watch, ScriptedVerifier(made), accepts)

    # ---- helpers -------------------------------------------------------------------------------------------

    def _request(self, prompt: Sequence[int]) -> Request:
        index, self._made = self._made, self._made + 1
        penalty = 0.5 if index % 3 == 0 else 0.0
        # With speculation some requests end in the middle of the accepted tokens.
        most = 6 if self._drafts is not None and index % 4 == 3 else 128
        sampling = SamplingParams(presence_penalty=penalty, ignore_eos=True, max_new_tokens=most)
        return Request(f"r{index}", array("q", prompt), sampling, arrival=0, index=index)

    def _started(self, req: Request) -> Request:
        cached = 0 if req.prefix_indices is None else req.prefix_indices.shape[0]
        if req.prefix_indices is None:
            req.prefix_indices = self.engine.cache.match_prefix(req.origin_input_ids).device_indices
        req.fill_len, req.extend_input_len = req.seqlen, req.seqlen - cached
        return req

    def _launch(self, batch: ScheduleBatch) -> None:
        self._launching = batch
        self._steps += 1
        overlap = self.engine.config.overlap
        launch = launch_step if self._drafts is None else launch_drafts
        result = launch(self.engine, batch, overlapped=overlap)
        self._unsettled.append((batch.copy(), result))
        if len(self._unsettled) > overlap:
            self._settle(*self._unsettled.pop(0))
        self._check_batches()

    def _settle(self, batch: ScheduleBatch, result: StepResult) -> None:
        if self._drafts is not None and batch.forward_mode.is_decode:
            settle_verify(self.engine, batch, result)
        else:
            self._append(batch, result)
        for req in batch.reqs:
            full = req.kv_committed_len + 2 > self.engine.config.context_len
            if full and req.status is Status.RUNNING and req is not self._under_way:
                self._end(req)

    def _append(self, batch: ScheduleBatch, result: StepResult) -> None:
        assert result.next_token_ids is not None
        for req, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=True):
            if req.status is Status.RUNNING and req is not self._under_way:
                req.output_ids.append(token)

    def _end(self, req: Request) -> None:
        release_kv_cache(req, self.engine.cache, is_insert=False, speculative=self._drafts is not None)
        req.status = Status.FINISHED

    def _check_batches(self) -> None:
        for name, batch in (("running", self.running), ("prefilled", self.last)):
            if batch is not None:
                where = f"the {name} batch after step {batch.step}"
                self.found += mirrors(
                    batch, where, unchanged, lengths=self._settled, sentinels=True, settled=self._settled
                )


@dataclass(frozen=True, slots=True)
class _Source:
    """A source without requests."""

    def due(self, now: int) -> Sequence[Request]:  # noqa: ARG002
        return ()

    def next_at(self) -> int | None:
        return None

    def ended(self, request: Request, now: int) -> None: ...


def _engine(row: RelayRow, scripted: ScriptedEngine, *, overlap: bool, drafts: DraftSetup | None) -> Engine:
    spec = None if drafts is None else drafts.config
    config = replace(CONFIG, overlap=overlap, mixed_chunk=spec is None, speculative=spec)
    width = config.context_len + (0 if spec is None else spec.overhang)
    slots = ReqToTokenPool(ROWS, width, device=config.device)
    allocator = KVAllocator(config.kv_tokens, 1, config.device)
    return Engine(
        config=config,
        slots=slots,
        allocator=allocator,
        cache=ChunkCache(slots, allocator),
        tier=KVTier(allocator),
        runner=scripted,
        sampler=Sampler(),
        grammars=None,
        relay=Relay.of(
            row,
            config,
            streams=Streams.of(config),
            observer=Observer(),
            req_to_token=slots.req_to_token,
            drafts=None if drafts is None else drafts.row,
        ),
        source=_Source(),
        clock=LogicalClock(),
        observer=Observer(),
        worker=None if spec is None else scripted.worker(spec),
    )


def _misfed(forward: Forward) -> Iterator[Violation]:
    for token, value in zip(forward.tokens(), forward.input_ids(), strict=True):
        meant = token_of(token.request, token.position)
        if not token.prompt and value != meant:
            text = f"row {token.row} of the relay gave token {value}, but {meant} was sampled for it"
            yield forward.violation("a step is fed the tokens that were sampled", "input_ids", token, text)
