"""Whole runs on CUDA that must give the same tokens, although other kernels compute them."""

from __future__ import annotations

import pytest

from schedbench.profiles.platform.resolve import resolve
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.scenarios.loader import load

pytestmark = pytest.mark.cuda

BURST = ["workload.requests=8", "workload.arrival.process=burst", "engine.chunked_prefill_size=4096"]


def tokens(scenario: str, *overrides: str, device: str = "cuda") -> dict[str, object]:
    resolved = resolve(load(scenario, [*BURST, *overrides]))
    options = Options(device=device, save_tokens=True)  # type: ignore[arg-type]
    result = execute(resolved, options)
    assert {row.status for row in result.requests} == {"finished"}
    return {row.id: row.token_ids for row in result.requests}


PLAIN = ["engine.speculative={algorithm: none}"]
DRAWN = ["workload.sampling.top_p=0.9", "workload.sampling.temperature=0.8"]


@pytest.mark.parametrize(
    ("scenario", "one", "other"),
    [
        # hosted KV, and all of it on the device
        ("hisparse", [], ["engine.hisparse.enabled=false", "engine.kv_tokens=16384"]),
        # by graphs, and without them
        ("hisparse", [], ["engine.cuda_graph=false"]),
        # chains of drafts and trees, and none
        ("spec_v2", [], PLAIN),
        ("spec_v1", ["engine.speculative.topk=2", "engine.speculative.draft_tokens=6"], PLAIN),
        # drawn through a filter, in either loop
        ("mixed", DRAWN, [*DRAWN, "engine.overlap=false"]),
    ],
)
def test_tokens_are_the_same(scenario: str, one: list[str], other: list[str]) -> None:
    assert tokens(scenario, *one) == tokens(scenario, *other)
