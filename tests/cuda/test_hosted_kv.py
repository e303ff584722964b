"""KV on the host on CUDA: the tokens are those of the same model with all KV on the device."""

from __future__ import annotations

import pytest

from schedbench.profiles.execute import Options, execute
from schedbench.profiles.resolve import resolve
from schedbench.scenarios.loader import load

pytestmark = pytest.mark.cuda

SMALL = ["workload.requests=8", "workload.arrival.process=burst", "engine.chunked_prefill_size=4096"]


def tokens(*overrides: str, device: str = "cuda") -> dict[str, object]:
    resolved = resolve(load("hisparse", [*SMALL, *overrides]))
    result = execute(resolved, resolved.relays[0], Options(device=device, save_tokens=True)).result  # type: ignore[arg-type]
    assert {row.status for row in result.requests} == {"finished"}
    return {row.id: row.token_ids for row in result.requests}


def test_hosted_kv_gives_the_tokens_of_kv_on_the_device() -> None:
    assert tokens() == tokens("engine.hisparse.enabled=false", "engine.kv_tokens=16384")


def test_by_graphs_and_without_them_the_tokens_are_the_same() -> None:
    assert tokens() == tokens("engine.cuda_graph=false")
