"""A mode's outputs without a scheduler: one request at a time, each by whole forwards of the model on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from schedbench.profiles.platform.resolve import Resolved
from schedbench.profiles.record.result import digest
from schedbench.profiles.run.feed import measured_workload
from schedbench.sched.batch import EncoderTokens, ForwardBatch, ModelOutput
from schedbench.sched.kernels.sampling import sample_greedy_tagged
from schedbench.sched.model.decoder import Decoder, Model
from schedbench.sched.model.tags import TaggedDecoder, TagPool
from schedbench.sched.model.weights import seeded_weights
from schedbench.sched.request import Request
from tests.sched.model.stages import forward_batch, kv_pool

CPU = torch.device("cpu")


def requests(question: Resolved) -> Iterator[Request]:
    return measured_workload(question).upcoming()


class PlainModel:
    """Slots 1 to ``longest`` are those of the one request, in order."""

    def __init__(self, question: Resolved, kind: type[Decoder] = Decoder, *, longest: int = 512) -> None:
        config = question.model
        self.table = torch.arange(1, longest + 1, dtype=torch.int32).repeat(2, 1)
        weights = seeded_weights(config, seed=question.scenario.model.seed, device=CPU)
        self.model: Model = kind(config, weights, kv=kv_pool(config, longest), req_to_token=self.table)
        if question.scenario.device.values == "none":
            tags = TagPool(slots=longest + 1, context_len=longest, device=CPU)
            self.model = TaggedDecoder(self.model, pool=tags, req_to_token=self.table)

    def batch(self, tokens: Sequence[int], *, start: int = 0) -> ForwardBatch:
        """Returns the forward of ``tokens`` from position ``start`` on."""
        return forward_batch(self.table, [(1, start, tokens)])

    def next_token(self, tokens: Sequence[int], *, encoder_len: int = 0) -> int:
        """Returns the greedy token after ``tokens``, of which the first are an encoder's; all are computed again."""
        output = self._forward(tokens, encoder_len)
        if output.fingerprint is None:
            return int(output.logits.argmax())
        return int(sample_greedy_tagged(output.logits, None, output.fingerprint))

    def logits(self, tokens: Sequence[int], *, encoder_len: int = 0) -> torch.Tensor:
        """Returns the logits of the last token, [vocab]."""
        return self._forward(tokens, encoder_len).logits[0]

    def _forward(self, tokens: Sequence[int], encoder_len: int) -> ModelOutput:
        batch = self.batch(tokens[encoder_len:], start=encoder_len)
        if encoder_len:
            batch.encoder = EncoderTokens(
                torch.tensor(tokens[:encoder_len]),
                self.table[1, :encoder_len].long(),
                torch.tensor([encoder_len]),
                batch.seq_lens - encoder_len,
            )
        return self.model.forward(batch)

    def digest(self, rows: Iterator[Request]) -> str:
        """The digest of the requests' outputs, each generated alone."""
        return digest([(req.id, self._outputs(req)) for req in rows])

    def _outputs(self, req: Request) -> list[int]:
        outputs: list[int] = []
        while len(outputs) < req.sampling.max_new_tokens:
            tokens = [*req.origin_input_ids, *outputs]
            outputs.append(self.next_token(tokens, encoder_len=req.encoder_len))
        return outputs
