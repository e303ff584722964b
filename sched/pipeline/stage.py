"""The layers of a pipeline stage, and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass


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
