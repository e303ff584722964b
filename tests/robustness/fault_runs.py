"""Runs with scripted faults, and the properties that hold in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from schedbench.profiles.record.result import Outputs, Result
from schedbench.scenarios.failures import phases, rank_names
from tests.acceptance.runs import known_result, resolved, result_of

FEW = (
    "model.preset=tiny-deep",
    "device.values=none",
    "workload.requests=6",
    "workload.arrival=burst",
    "workload.prompt_tokens={dist: uniform, min: 40, max: 120}",
    "workload.output_tokens={dist: uniform, min: 3, max: 8}",
    "engine.overlap=auto",
    "engine.chunked_prefill_size=64",
    "measure.warmup_requests=0",
)
WORLDS = {
    "two stages": ("engine.pipeline.stages=2",),
    "four stages": ("engine.pipeline.stages=4",),
    "two engines": ("engine.replicas=2",),
    "two ranks": ("engine.data_parallel.ranks=2",),
    "two ranks with one MLP": ("engine.data_parallel={ranks: 2, mlp: shared}", "engine.cuda_graph=false"),
    "1x1": ("engine.disaggregation={mode: pair}",),
    "2x2": ("engine.disaggregation={mode: pair, prefill: 2, decode: 2}",),
}


class Death(NamedTuple):
    rank: str
    phase: str
    nth: int

    def __str__(self) -> str:
        return f"{self.rank}, {self.phase} {self.nth}"

    @property
    def scripted(self) -> str:
        return f"faults=[{{rank: {self.rank}, dies: {{phase: {self.phase}, nth: {self.nth}}}}}]"


def deaths(world: str, *counts: int) -> Iterator[Death]:
    """Every rank, in each of its phases, at each of the given occurrences."""
    scenario = resolved("mixed", *FEW, *WORLDS[world]).scenario
    for rank in rank_names(scenario):
        for phase in phases(scenario, rank):
            yield from (Death(rank, phase, nth) for nth in counts)


# The same run without faults.
whole = partial(known_result, "mixed", *FEW)


def broken(script: str, *overrides: str) -> Result:
    """Runs with faults. Every request ends once, and those that finish have the right tokens. The surviving ranks hold
    no memory, and there is no hazard where the run was checked for them."""
    found = result_of("mixed", *FEW, *overrides, script)
    meant = {row.id: row for row in whole(*overrides).requests}
    assert [row.id for row in found.requests] == list(meant)
    for row in found.requests:
        assert row.reason
        assert row.status == "failed" or row.token_ids == meant[row.id].token_ids
    return found


def unbroken(result: Result, *overrides: str) -> bool:
    """Whether the tokens are those of a run without faults."""
    expected = whole(*overrides)
    return isinstance(result.outputs, Outputs) and result.outputs == expected.outputs
