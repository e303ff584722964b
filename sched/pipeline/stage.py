"""Which layers, and which turn, a pipeline stage has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage ``index`` of ``count``. ``async_depth`` microbatches are in flight beyond one per stage. With
    ``skip_chunk_outputs`` the token behind a lone unfinished prompt, which means nothing, goes nowhere (#26148).
    ``smooth_chunks``: by what share chunks follow latencies; None where all have one size."""

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
    """Equal shares of the model; what is left over goes to stages from the last but one backwards, since the last has
    the head and the first the embedding. Raises ValueError when there are fewer layers than stages."""
    if layers < stages:
        raise ValueError(f"{layers} layers cannot be split over {stages} stages")
    share, rest = divmod(layers, stages)
    sizes = [share + (stages - 1 - rest <= index < stages - 1) for index in range(stages)]
    starts = [sum(sizes[:index]) for index in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
