"""Which results can be compared."""

from __future__ import annotations

import pytest

from schedbench.profiles.judge.likeness import (
    LikenessError,
    ScenarioDifference,
    engine_differences,
    unlike,
    unlike_environments,
)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"labels.emulated": False}, "labels.emulated"),
        ({"labels.profiled": True}, "labels.profiled"),
        ({"labels.acceptance": "simulated"}, "labels.acceptance"),
        ({"hardware.name": "a100"}, "hardware.name"),
        ({"hardware.sha256": "0" * 64}, "hardware.sha256"),
        ({"scenario.expanded.workload.requests": 3}, "workload.requests"),
        ({"scenario.expanded.model.preset": "tiny-qwen3"}, "model.preset"),
        ({"scenario.expanded.engine.kv_tokens": 65}, "engine.kv_tokens"),
    ],
)
def test_results_of_other_runs_are_unlike(result, change, key):
    assert [difference.key for difference in unlike(result(), result(change))] == [key]


@pytest.mark.parametrize(
    "change",
    [
        {"scenario.expanded.name": "other"},
        {"scenario.expanded.engine.overlap": False},
        {"scenario.expanded.measure.repeat": 9},
        {"scenario.expanded.workload.invented_later": 1},
        {"environment.torch": "2.12"},
        {"relay.state": "latest"},
        {"labels.world": "distributed"},  # tokens and counts are the same
        {"labels.acceptance": "measured"},  # speculation against none
    ],
)
def test_other_differences_are_allowed(result, change):
    assert unlike(result(), result(change)) == ()


def test_varied_capacity_is_allowed(result):
    smaller = result({"scenario.expanded.engine.kv_tokens": 32})
    assert unlike(result(), smaller, varied={"engine.kv_tokens"}) == ()


def test_edited_files_of_the_question_are_unlike_and_those_of_the_engine_are_compared(result):
    """As two versions of a relay's file, which the scenario calls by one name."""
    for key, of_engine in (("workload.trace", False), ("engine.relay", True)):
        a, b = (
            result({"scenario.inputs": [{"key": key, "file": "own", "sha256": digit * 64}]}) for digit in "12"
        )
        edited = (ScenarioDifference(f"{key}, contents of own", "1" * 16, "2" * 16),)
        assert unlike(a, b) == (() if of_engine else edited)
        assert engine_differences(a, b) == (edited if of_engine else ())


def test_differences_of_engine_and_environment_are_listed(result):
    other = result({"scenario.expanded.engine.overlap": False, "environment.torch": "2.12"})
    assert engine_differences(result(), other) == (ScenarioDifference("engine.overlap", True, False),)
    latest = engine_differences(result(), result({"relay.state": "latest", "relay.switches.barrier": "top"}))
    assert [difference.key for difference in latest] == ["relay.state", "relay.switches.barrier"]
    assert unlike_environments(result(), other) == (ScenarioDifference("torch", "2.13.0", "2.12"),)


def test_a_capture_without_graphs_traced_none_in_another_way(result):
    none, node, graph = (result({"environment.cuda_graph_trace": mode}) for mode in ("none", "node", "graph"))
    assert unlike_environments(none, node) == ()
    assert unlike_environments(node, graph) == (ScenarioDifference("cuda_graph_trace", "node", "graph"),)


def test_all_differences_are_listed():
    error = LikenessError([ScenarioDifference("a.b", 1, 2), ScenarioDifference("c", "x", None)])
    assert (
        str(error)
        == "A and B are not alike and cannot be compared:\n  a.b: 1 against 2\n  c: 'x' against None"
    )


ENGINE = {
    "name": "sglang",
    "version": "1",
    "ref": "main",
    "commit": "a" * 40,
    "dirty": False,
    "sha256": "0" * 64,
}


def test_an_engine_of_another_project_may_be_compared_with_every_other(result):
    own, one = result(), result({"labels.engine": ENGINE})
    other = result({"labels.engine": {**ENGINE, "ref": "fix", "sha256": "1" * 64, "edge": {"hollow": ["x"]}}})
    assert unlike(own, one) == unlike(one, other) == ()
    assert engine_differences(own, one) == (ScenarioDifference("labels.engine", "schedbench", "sglang"),)
    assert engine_differences(one, other) == (ScenarioDifference("labels.engine.ref", "main", "fix"),)
    edited = result({"labels.engine": {**ENGINE, "sha256": "2" * 64}})
    assert [difference.key for difference in engine_differences(one, edited)] == ["labels.engine.sha256"]
