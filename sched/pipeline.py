"""A pipeline stage: its neighbours, the decoder of its layers, its requests, and the sizes of its chunks.

    embedding | layers 0..k | -- hidden, residual --> | layers k+1..n | norm, head

Proxies are the input of the next layer: the last layer's output, and the residual stream, to which it is not added yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import NamedTuple

import numpy as np

from .batch import ForwardBatch, LayerPart, ModelOutput
from .link import FOREVER, Link, LinkError, Message
from .model.decoder import Decoder
from .request import Request, RequestSource


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage ``index`` of ``count``. ``async_depth`` is the number of microbatches in flight beyond one per stage. With
    ``skip_chunk_outputs`` the token of a batch that is a single unfinished prompt, which has no meaning, is not sent
    (#26148). ``smooth_chunks`` is the share by which chunk sizes follow latencies; None if all chunks have one size."""

    index: int
    count: int
    layers: range  # of the whole model
    async_depth: int = 0
    skip_chunk_outputs: bool = False
    smooth_chunks: float | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def following(self) -> int:
        return (self.index + 1) % self.count

    @property
    def preceding(self) -> int:
        return (self.index - 1) % self.count

    @property
    def microbatches(self) -> int:
        """Batches that take turns (upstream ``pp_loop_size``)."""
        return self.count + self.async_depth


def split_layers(layers: int, stages: int) -> list[range]:
    """Equal shares of the model. Remaining layers go to the stages from the last but one backwards, since the last
    stage has the head and the first one the embedding. Raises ValueError if there are fewer layers than stages."""
    if layers < stages:
        raise ValueError(f"{layers} layers cannot be split over {stages} stages")
    share, rest = divmod(layers, stages)
    sizes = [share + (stages - 1 - rest <= index < stages - 1) for index in range(stages)]
    starts = [sum(sizes[:index]) for index in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


class StageDecoder:
    """``decoder`` has only the stage's layers."""

    def __init__(self, decoder: Decoder, stage: Stage) -> None:
        self._decoder = decoder
        self._stage = stage

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        """Logits on the last stage. On every other stage ``proxies`` for the next one, hidden and residual [T, hidden]
        each, and no logits."""
        stage, here = self._stage, len(self._decoder.weights.layers)
        behind = not stage.is_last  # how many layers there are does not matter
        part = LayerPart(0, here, here + behind, () if stage.is_first else batch.proxies[:2])
        output = self._decoder.forward(replace(batch, part=part))
        return output if part.is_last else ModelOutput(output.logits, proxies=part.state)


REQUESTS = "requests"


class StageSource:
    """A stage's source: the first stage takes the requests of each turn from ``source`` and sends them to the second
    stage, which forwards them to the third, and so on, so that every stage has the same requests in the same turn."""

    def __init__(self, source: RequestSource, link: Link, stage: Stage) -> None:
        self.over = False  # no turn follows; of a later stage
        self._source = source
        self._link = link
        self._stage = stage
        self._turn = 0
        self._early: Message | None = None  # the next turn's requests, if they came while the stage slept

    def due(self, now: int) -> Sequence[Request]:
        """The requests of this turn. Raises LinkError, also if a turn is missing: the stages would plan different
        batches."""
        arrived = list(self._source.due(now)) if self._stage.is_first else self._received()
        self._forward(arrived)
        return arrived or ()

    def next_at(self) -> int | None:
        """None on a later stage: the preceding stage decides when the next turn begins."""
        return self._source.next_at() if self._stage.is_first else None

    def ended(self, request: Request, now: int) -> None:
        """The first stage reports endings."""
        if self._stage.is_first:
            self._source.ended(request, now)

    def close(self) -> None:
        """Announce that no turn follows the first stage's last one, so that the other stages stop."""
        self._forward(None)

    def await_turn(self) -> None:
        """Sleep until the next turn begins or a rank is gone, however long no request arrives."""
        while self._early is None and not self._link.gone():
            self._link.wait((REQUESTS,), FOREVER)
            self._early = self._link.poll(REQUESTS)

    def _received(self) -> list[Request] | None:
        turn, arrived = (self._early or self._link.receive(self._stage.preceding, REQUESTS)).value
        self._early = None
        if turn != self._turn:
            raise LinkError(
                f"stage {self._stage.index} waited for the requests of turn {self._turn} from stage "
                f"{self._stage.preceding}, which sent those of turn {turn}"
            )
        self.over = arrived is None
        return arrived  # type: ignore[no-any-return]

    def _forward(self, arrived: list[Request] | None) -> None:
        if not self._stage.is_last:
            self._link.send(self._stage.following, REQUESTS, (self._turn, arrived))
        self._turn += 1


_SIGNIFICANT = 0.01  # share of the longest prompt's time
_GRAIN = 64  # tokens that a chunk is a multiple of, unless pages are larger


class Curve(NamedTuple):
    """The cost of n tokens from the start of a prompt, ns: ``square`` n^2 + ``linear`` n, besides a constant per
    forward. Both are positive, or both are zero if the measurements show no such curve."""

    square: float
    linear: float


def fit(lengths: Sequence[int], times: Sequence[int]) -> Curve:
    """Fit a curve by least squares to prompts of at least three ``lengths``, in rising order, that took ``times``, ns.
    If one of its terms is insignificant, both are zero."""
    fitted = np.polyfit(np.array(lengths, dtype=np.float64), np.array(times, dtype=np.float64), 2)
    square, linear = float(fitted[0]), float(fitted[1])
    least = min(square * lengths[-1] ** 2, linear * lengths[-1])
    return Curve(square, linear) if least > _SIGNIFICANT * times[-1] else Curve(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """Chunk sizes for which every chunk takes as long as the first one (upstream ``--enable-dynamic-chunking``).

    A later chunk of a prompt attends to more tokens. Chunks of equal size therefore take longer and longer, and stages
    wait for one another::

        equal sizes     |---|----|-----|------|          equal times    |----|----|----|----|-|

    ``first`` is the size of a prompt's first chunk, in tokens. A later chunk is shortened by the share ``smooth`` of
    the difference to the size that would take equally long."""

    curve: Curve
    first: int
    smooth: float
    page_size: int

    def behind(self, tokens: int) -> int:
        """The size of a chunk that follows ``tokens`` tokens: x with T(tokens + x) - T(tokens) = T(first)."""
        square, linear = self.curve
        if square == 0:
            return self.first
        slope = linear + 2 * square * tokens
        wanted = square * self.first**2 + linear * self.first
        equal = (sqrt(slope**2 + 4 * square * wanted) - slope) / (2 * square)
        grain = max(_GRAIN, self.page_size)
        size = round(self.first + self.smooth * (equal - self.first)) // grain * grain
        return min(max(size, grain), self.first)
