"""Block diffusion: requests grow by blocks whose tokens are found in any order (upstream's DLLM mode).

A block begins as the known tokens of its request and masks. Forwards are repeated, each of which makes some masks
tokens, until none is left; one more forward stores the block's KV. The results are a list of tensors, of a length of
their own each. No request ever joins a running batch: it stays staged with its row, and its next block is planned when
the last one is settled. Upstream examines every request of a pass by itself, with several reads of the device; here one
kernel serves the batch, and one read says whether masks are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..batch import ForwardBatch, FutureIndices, ScheduleBatch, StepResult
from ..config import BlockConfig
from ..kernels.sampling import unmask, unmask_tagged
from ..request import Request, Status
from .engine import Engine
from .launch import make_forward_batch
from .prepare import prepare_for_extend
from .scheduler import Scheduler
from .settle import finish, take_tokens


class BlockScheduler(Scheduler):
    """``_staged``: the requests that hold a row. Blocks of prompts run before blocks with masks, in batches of their
    own."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        assert engine.config.blocks is not None
        self._block = engine.config.blocks.size
        self._staged: list[Request] = []

    def held(self) -> Iterable[Request]:
        return self._staged

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        engine = self.engine
        with engine.observer.range("admit", self.next_step, len(self.waiting_queue)):
            self._keep_blocks()
            self._admit()
            reqs = self._next_blocks()
        if not reqs:
            return None
        engine.observer.planned(self.next_step, "prefill")
        with engine.observer.range("prepare", self.next_step, len(reqs)):
            batch = prepare_for_extend(engine, reqs, self.next_step)
        return self.numbered(batch)

    def settle(self, batch: ScheduleBatch, result: StepResult) -> None:
        self.settle_by(settle_blocks, batch, result)

    def _keep_blocks(self) -> None:
        """Make the blocks of the last step a prefix of the next ones."""
        self._staged = [req for req in self._staged if not req.finished]
        for req in () if self.last_batch is None else self.last_batch.reqs:
            if not req.finished:
                self.engine.cache.cache_unfinished_req(req)

    def _admit(self) -> None:
        """Stage waiting requests while there are rows, and KV for all of their blocks: nothing is ever retracted."""
        self._order.sort(self.waiting_queue)
        room = self.engine.allocator.available_size()
        room -= sum(self._longest(req) - req.kv_allocated_len for req in self._staged)
        while self.waiting_queue and len(self._staged) < self.engine.config.max_running_requests:
            room -= self._longest(self.waiting_queue[0])
            if room < 0:
                return
            self._staged.append(self.waiting_queue.pop(0))

    def _longest(self, req: Request) -> int:
        return -(-(len(req.origin_input_ids) + req.sampling.max_new_tokens) // self._block) * self._block

    def _next_blocks(self) -> Sequence[Request]:
        """The requests of the next step, with their next block."""
        most = max(1, self.engine.config.max_prefill_tokens // self._block)
        for req in self._staged:
            req.fill_len = req.kv_committed_len + self._block
            req.extend_input_len = self._block
        prompts = [req for req in self._staged if req.fill_len <= req.seqlen]
        return (prompts or self._staged)[:most]


def launch_blocks(engine: Engine, batch: ScheduleBatch) -> StepResult:
    """Find the tokens of every block, on the current stream. Blocks of prompts have none to find."""
    assert engine.config.blocks is not None
    relay = engine.relay
    with relay.isolate_prompt(batch):
        engine.tier.before_forward(batch)
        result = StepResult(None, FutureIndices(batch.req_pool_indices, None))
        with engine.observer.range("model", batch.step, batch.num_tokens):
            view = make_forward_batch(engine, batch)
            result.block_tokens = _found(engine, engine.config.blocks, batch, view)
        relay.keep_alive(batch, result)
    relay.conclude_blocks(batch, result)
    return result


def settle_blocks(engine: Engine, batch: ScheduleBatch, result: StepResult) -> bool:
    """Give every request the tokens of its block, up to its end, by a blocking copy each. Returns False: no step is a
    steady decode."""
    assert result.block_tokens is not None
    engine.allocator.free_group_begin()
    for req, block in zip(batch.reqs, result.block_tokens, strict=False):  # blocks of prompts give no tokens
        tokens = block.tolist()
        if req.status is not Status.RUNNING:
            continue
        count, ending = take_tokens(engine, req, tokens, ())
        if req.first_token_at is None:
            req.first_token_at = engine.clock.now()
        engine.observer.tokens([req], count)
        if ending is not None:
            finish(engine, req, *ending)
    engine.allocator.free_group_end()
    return False


def _found(
    engine: Engine, blocks: BlockConfig, batch: ScheduleBatch, view: ForwardBatch
) -> list[torch.Tensor]:
    """The tokens that were masked, of each request, after the forward that stores their KV."""
    known = [min(req.seqlen, req.fill_len) - req.prefix_len for req in batch.reqs]
    for _ in range(blocks.size):
        if not (view.input_ids == blocks.mask_id).any().item():
            break
        output = engine.runner.forward(view)
        rule = (blocks.mask_id, blocks.threshold, blocks.size)
        if output.fingerprint is None:
            unmask(view.input_ids, output.logits, *rule)
        else:
            unmask_tagged(view.input_ids, output.logits, output.fingerprint, *rule)
    engine.runner.forward(view)
    if min(known) == blocks.size:
        return []
    rows = view.input_ids.view(-1, blocks.size)
    return [rows[place, count:] for place, count in enumerate(known)]
