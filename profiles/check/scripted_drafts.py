"""The drafter and the verifier of ``ScriptedEngine``: tokens and states follow from the request and the position.

So the right arguments of each call are known, and a relay that passes other values, or in another order, violates them.
Some drafts are right and some are wrong, so that the requests of a batch advance by different counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...sched.batch import DraftInput, DraftState, ForwardBatch, ModelOutput, ScheduleBatch
from ...sched.config import SpeculativeConfig
from ...sched.model.sampling import SamplingInfo
from ...sched.relay.row import DraftRow, Speculation
from ...sched.request import Request
from ...sched.speculate.drafter import DraftRows, Tree, VerifiedChains
from ...sched.speculate.verifier import DraftVerdict
from .batch_invariants import PROMPTS, Violation

TAUGHT = "the draft model is extended by what the target accepted"
VERIFIED = "a verify starts where the last one ended"

VOCABULARY = 997
STEPS = 2


class DraftSetup(NamedTuple):
    """The worker's mode, and the relay's policies for it."""

    mode: Speculation
    row: DraftRow

    @property
    def config(self) -> SpeculativeConfig:
        return SpeculativeConfig(self.mode, steps=STEPS, topk=1, draft_tokens=STEPS + 1)


def token_of(request: Request, position: int) -> int:
    """The token that is sampled for that position of the request."""
    return (31 * request.index + 7 * position + 5) % VOCABULARY


def hidden_of(request: Request, position: int) -> list[float]:
    """The target's hidden state at that position; the draft model's ends in 1."""
    return [float(request.index), float(position), 0.0]


def _guess(request: Request, length: int, nth: int) -> int:
    """The ``nth`` draft after the token at ``length``. How many are right depends on the request and the length."""
    right = nth < (request.index + length) % (STEPS + 1)
    return (token_of(request, length + 1 + nth) + (0 if right else 1)) % VOCABULARY


class ScriptedDrafter:
    """In place of ``Drafter``. ``lengths`` are the lengths of each request's KV, as the target accepted."""

    def __init__(self, launching: Callable[[], ScheduleBatch], report: Callable[[Violation], None]) -> None:
        self._launching = launching
        self._report = report
        self.lengths: dict[Request, int] = {}

    def draft(self, start: DraftInput, at: DraftRows) -> Tree:
        reqs = self.requests(at.rows)
        for req, length, token in zip(reqs, at.seq_lens.tolist(), start.bonus_tokens.tolist(), strict=True):
            self._expect(VERIFIED, "seq_lens", req, length, self.lengths.get(req), "starts at length")
            self._expect(TAUGHT, "bonus_tokens", req, token, token_of(req, length), "starts from token")
        drafts = [[_guess(req, self.lengths[req], nth) for nth in range(STEPS)] for req in reqs]
        return Tree(torch.cat([start.bonus_tokens.unsqueeze(1), torch.tensor(drafts)], 1), None)

    def extend(self, batch: ForwardBatch, hidden_states: torch.Tensor) -> DraftState:
        assert batch.extend_lens is not None and batch.extend_prefix_lens is not None
        reqs, ends = self.requests(batch.req_pool_indices), batch.seq_lens.tolist()
        extend, prefix = batch.extend_lens.tolist(), batch.extend_prefix_lens.tolist()
        ids, states = batch.input_ids.tolist(), hidden_states.tolist()
        place = 0
        for req, end, count, before in zip(reqs, ends, extend, prefix, strict=True):
            begin = self._begin(req)
            self._expect(TAUGHT, "extend_lens", req, before, begin, "is extended from position")
            self._expect(TAUGHT, "extend_lens", req, before + count, end, "is extended up to position")
            self._check_extend(req, begin, ids[place : place + count], states[place : place + count])
            self.lengths[req] = end
            place += count
        return self._extended(reqs)

    def extend_chains(self, chains: VerifiedChains) -> DraftState:
        predict, hidden_states, accept_lens, (rows, ends, _), lens = chains
        reqs, d = self.requests(rows), STEPS + 1
        extend, prefix = (part.tolist() for part in lens)
        ids, states = predict.view(-1, d).tolist(), hidden_states.view(-1, d, 3).tolist()
        for i, (req, end, accepted) in enumerate(zip(reqs, ends.tolist(), accept_lens.tolist(), strict=True)):
            begin = self.lengths[req]
            self._expect(TAUGHT, "extend_lens", req, extend[i], d, "is extended by a number of tokens")
            self._expect(TAUGHT, "extend_lens", req, prefix[i], begin, "is extended from position")
            self._expect(TAUGHT, "seq_lens", req, end, begin + d, "is extended up to position")
            self._check_extend(req, begin, ids[i][:accepted], states[i][:accepted])
            self.lengths[req] = begin + accepted
        return self._extended(reqs)

    # ---- helpers -------------------------------------------------------------------------------------------

    def requests(self, rows: torch.Tensor) -> list[Request]:
        """The requests of rows of the batch. A row without a request raises KeyError."""
        owners = {req.req_pool_idx: req for req in self._launching().reqs}
        return [owners[row] for row in rows.tolist()]

    def _begin(self, req: Request) -> int:
        """The first position of an extend: of a part of a prompt, or of what a serial verify accepted."""
        batch = self._launching()
        if not batch.forward_mode.is_extend:
            return self.lengths[req]
        return batch.prefix_lens[batch.reqs.index(req)]

    def _check_extend(
        self, req: Request, begin: int, ids: Sequence[int], states: Sequence[Sequence[float]]
    ) -> None:
        """The draft model gets the token after each position. After an unfinished chunk any token will do."""
        prompt = req.origin_input_ids
        for position, (value, state) in enumerate(zip(ids, states, strict=True), begin):
            promise, meant = TAUGHT, token_of(req, position + 1)
            if position + 1 < len(prompt):
                promise, meant = PROMPTS, prompt[position + 1]
            unfinished = position + 1 == begin + len(ids) < len(prompt)
            if not unfinished:
                self._expect(
                    promise, "input_ids", req, value, meant, f"is extended at position {position} by"
                )
            self._expect(
                TAUGHT, "hidden_states", req, state, hidden_of(req, position), "is extended by the state"
            )

    def _expect(
        self, promise: str, field: str, req: Request, value: object, meant: object, doing: str
    ) -> None:
        if value != meant:
            step = self._launching().step
            text = f"step {step}, request {req.id}: its draft {doing} {value}, not {meant}"
            self._report(Violation(promise, field, text))

    def _extended(self, reqs: Sequence[Request]) -> DraftState:
        ends = [(req, self.lengths[req]) for req in reqs]
        return DraftState(
            torch.tensor([[float(length)] for _, length in ends]),
            torch.tensor([[_guess(req, length, 0)] for req, length in ends]),
            torch.tensor([[*hidden_of(req, length)[:2], 1.0] for req, length in ends]),
        )


class ScriptedVerifier:
    """In place of ``Verifier``."""

    def __init__(self, drafts: ScriptedDrafter) -> None:
        self._drafts = drafts

    def forward(self, tree: Tree, at: DraftRows, slots: torch.Tensor | None) -> ModelOutput:  # noqa: ARG002
        reqs, count = self._drafts.requests(at.rows), tree.tokens.shape[1]
        places = [(req, self._drafts.lengths[req] + nth) for req in reqs for nth in range(count)]
        logits = torch.tensor([[float(token_of(req, position + 1))] for req, position in places])
        states = torch.tensor([hidden_of(req, position) for req, position in places])
        return ModelOutput(logits, hidden_states=states)

    def predict(
        self,
        tree: Tree,  # noqa: ARG002
        output: ModelOutput,
        info: SamplingInfo,  # noqa: ARG002
        seq_lens: torch.Tensor,  # noqa: ARG002
    ) -> DraftVerdict:
        assert output.hidden_states is not None
        return DraftVerdict(output.logits[:, 0].to(torch.int64), output.hidden_states, None)


def prompt_states(batch: ScheduleBatch) -> torch.Tensor:
    """The target's states [T, 3] of an extend batch's tokens."""
    parts = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
    return torch.tensor([hidden_of(req, begin + nth) for req, begin, count in parts for nth in range(count)])
