"""The memory that a run needs on this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedbench.profiles.judge.local import LocalSide
from schedbench.profiles.judge.trials import Question, TrialRequest
from schedbench.profiles.platform import capacity
from schedbench.profiles.platform.machine import MachineError
from schedbench.profiles.platform.resolve import ask


def test_a_model_that_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(MachineError, match=r"needs .* GiB of memory .* engine.kv_tokens"):
        capacity.check(ask("mixed", ["engine.kv_tokens=1000000000000"]))
    side = LocalSide("kv", Question.of("mixed", ["engine.kv_tokens=1000000000000"]), TrialRequest())
    with pytest.raises(MachineError, match=r"^kv: this run needs .* GiB"):
        side.run(0)
    for override in ("model.preset=llama-3-70b", "engine.page_size=1000000000000"):
        with pytest.raises(MachineError, match="GiB"):
            capacity.check(ask("mixed", [override, "model.dtype=float32"]))


def test_a_long_context_needs_a_long_table_of_angles() -> None:
    resolved = ask("mixed", ["engine.max_running_requests=1"])
    longer = replace(resolved, model=replace(resolved.model, max_positions=10**9))
    grown = capacity.needed_bytes(longer) - capacity.needed_bytes(resolved)
    assert grown > 10**9 * resolved.model.head_dim * 8


def test_shapes_without_values_fit() -> None:
    capacity.check(ask("overlap_on", ["model.preset=llama-3-70b"]))


def test_ranks_add_up_but_stages_share_the_layers() -> None:
    many = ["engine.kv_tokens=1000000"]
    capacity.check_world(ask("mixed", [*many, "engine.replicas=2"]))
    with pytest.raises(MachineError, match="fewer ranks, "):
        capacity.check_world(ask("mixed", [*many, "engine.replicas=256"]))
    with pytest.raises(MachineError, match="fewer ranks, "):
        capacity.check_world(ask("disagg", [*many, "engine.disaggregation.decode=256"]))
    staged = ask("pp2", ["engine.pipeline.stages=32"])
    capacity.check_world(staged)
