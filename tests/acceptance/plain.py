"""A mode's outputs without a scheduler: one request at a time, each by whole forwards of the model on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from schedbench.profiles.platform.resolve import Resolved
from schedbench.profiles.record.result import digest
from schedbench.profiles.run.feed import measured_workload
from schedbench.sched.batch import EncoderTokens, ForwardBatch, ForwardMode, ModelOutput
from schedbench.sched.kernels.rows import extend_positions
from schedbench.sched.kernels.sampling import sample_greedy_tagged
from schedbench.sched.memory.pools import KVPool
from schedbench.sched.model.config import ModelConfig
from schedbench.sched.model.decoder import Decoder, Model
from schedbench.sched.model.tags import TaggedDecoder, TagPool
from schedbench.sched.model.weights import seeded_weights
from schedbench.sched.request import Request

CPU = torch.device("cpu")


def requests(question: Resolved) -> Iterator[Request]:
    return measured_workload(question).upcoming()


class PlainModel:
    """Slots 1 to ``longest`` are those of the one request, in order."""

    def __init__(self, question: Resolved, kind: type[Decoder] = Decoder, *, longest: int = 512) -> None:
        config = question.model
        self.table = torch.arange(1, longest + 1, dtype=torch.int32).repeat(2, 1)
        weights = seeded_weights(config, seed=question.scenario.model.seed, device=CPU)
        self.model: Model = kind(config, weights, kv=_pool(config, longest), req_to_token=self.table)
        if question.scenario.device.values == "none":
            tags = TagPool(slots=longest + 1, context_len=longest, device=CPU)
            self.model = TaggedDecoder(self.model, pool=tags, req_to_token=self.table)

    def batch(self, tokens: Sequence[int], *, start: int = 0) -> ForwardBatch:
        """Returns the forward of ``tokens`` from position ``start`` on."""
        end = torch.tensor([start + len(tokens)])
        lens = torch.tensor([len(tokens)], dtype=torch.int32)
        return ForwardBatch(
            mode=ForwardMode.EXTEND,
            batch_size=1,
            num_tokens=len(tokens),
            input_ids=torch.tensor(tokens),
            positions=extend_positions(end, lens, len(tokens)),
            req_pool_indices=torch.tensor([1]),
            seq_lens=end,
            out_cache_loc=self.table[1, start : start + len(tokens)].long(),
            max_seq_len=int(end),
            extend_lens=lens,
            extend_prefix_lens=torch.tensor([start], dtype=torch.int32),
            max_extend_len=len(tokens),
        )

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


def _pool(config: ModelConfig, longest: int) -> KVPool:
    return KVPool(
        num_layers=config.num_layers,
        tokens=longest,
        page_size=1,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
        device=CPU,
    )
