"""The table of modes: the pairs that are refused, those not implemented yet, the choice of ``auto``, and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schedbench.scenarios.combinations import MODES, RULES, Rule, findings, overlaps
from schedbench.scenarios.schema import Scenario

SPECULATES = {"speculative": {"algorithm": "eagle"}}
ON: dict[str, dict[str, Any]] = {
    "overlap": {"engine": {"overlap": True}},
    "mixed chunk": {"engine": {"mixed_chunk": True}},
    "unchunked prefill": {"engine": {"chunked_prefill_size": "none"}},
    "radix cache": {"engine": {"radix_cache": True}},
    "speculation": {"engine": SPECULATES},
    "speculation v1": {"engine": {"speculative": {"algorithm": "eagle", "mode": "v1"}}},
    "speculation v2": {"engine": {"speculative": {"algorithm": "eagle", "mode": "v2"}}},
    "draft trees": {"engine": {"speculative": {"algorithm": "eagle", "mode": "v1", "topk": 4}}},
    "pages": {"engine": {"page_size": 16}},
    "hisparse": {"engine": {"hisparse": {"enabled": True}}},
    "pipeline": {"engine": {"pipeline": {"stages": 2}}},
    "dynamic chunks": {"engine": {"pipeline": {"stages": 2, "dynamic_chunks": True}}},
    "replicas": {"engine": {"replicas": 2}},
    "disaggregation": {"engine": {"disaggregation": {"mode": "pair"}}},
    "fake transfer": {"engine": {"disaggregation": {"mode": "pair", "transfer": "fake"}}},
    "data-parallel ranks": {"engine": {"data_parallel": {"ranks": 2}}},
    "shared MLP": {"engine": {"data_parallel": {"ranks": 2, "mlp": "shared"}}},
    "encoder-decoder": {
        "engine": {"chunked_prefill_size": "none"},
        "workload": {"encoder_tokens": 8},
    },
    "block diffusion": {"engine": {"block_diffusion": {"enabled": True}}},
    "embedding": {"engine": {"embedding": True}, "workload": {"output_tokens": 1}},
    "split prefill": {"engine": {"split_prefill": {"enabled": True}, "chunked_prefill_size": "none"}},
    "deferred": {"engine": {"deferred": True}},
    "prompt logprobs": {"workload": {"sampling": {"prompt_logprobs": True}}},
    "hidden states": {"workload": {"sampling": {"hidden_states": True}}},
    "controls": {"workload": {"controls": ({"action": "flush", "at": 1},)}},
    "graphs": {"engine": {"cuda_graph": True}},
    "own model runner": {"engine": {"model_runner": "own"}},
    "measured host": {"device": {"host": "measured"}},
    "grammar": {"workload": {"sampling": {"grammar": {"regex": "a+"}}}},
    "logprobs": {"workload": {"sampling": {"logprobs": True}}},
    "minimum length": {"workload": {"sampling": {"min_new_tokens": 1}}},
    "values none": {"device": {"values": "none"}},
}


def merged(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(left[key], right[key]) for key in left if isinstance(left[key], dict) and key in right
    }
    return {**left, **right, **both}


def scenario(*modes: str, **sections: Any) -> Scenario:
    data: dict[str, Any] = {
        "name": "s",
        "model": {"preset": "tiny-llama"},
        "engine": {"overlap": False, "radix_cache": False, "cuda_graph": False},
        "workload": {"requests": 1, "prompt_tokens": 1, "output_tokens": 1},
    }
    for change in (*(ON[mode] for mode in modes), sections):
        data = merged(data, change)
    return Scenario.model_validate(data)


def texts(scenario: Scenario, *rules: Rule) -> list[str]:
    return [text for _, text in findings(scenario, rules or RULES) if "not available" not in text]


def test_a_mode_is_on_only_where_it_is_set() -> None:
    assert {mode for mode in MODES if MODES[mode].on(scenario(mode))} == MODES.keys()
    assert not {mode for mode in MODES if MODES[mode].on(scenario())}


def test_no_mode_is_refused_alone() -> None:
    assert not {mode: found for mode in MODES if (found := texts(scenario(mode)))}


def test_refused_pairs_are_refused_with_their_reasons() -> None:
    for rule in RULES:
        asked = scenario(rule.first, rule.second)
        refusal = f"{rule.first} cannot be combined with {rule.second}: {rule.reason}"
        assert (refusal in texts(asked)) == (rule.verdict == "refused"), rule
        of_engines = [text for _, text in findings(asked, verdict="engines")]
        assert (refusal in of_engines) == (rule.verdict == "engines"), rule


TREES = Rule("draft trees", "speculation v2", "so")
FIRST, SECOND = MODES["draft trees"].key, MODES["speculation v2"].key


def trees() -> Scenario:
    return scenario(engine={"speculative": {"algorithm": "eagle", "mode": "v2", "topk": 2}})


@pytest.mark.parametrize(
    ("overridden", "blamed"),
    [((), FIRST), ((SECOND,), SECOND), ((FIRST,), FIRST), ((FIRST, SECOND), FIRST), ((("engine",),), FIRST)],
)
def test_a_refusal_names_the_key_that_was_overridden(
    overridden: tuple[tuple[str, ...], ...], blamed: tuple[str, ...]
) -> None:
    assert [path for path, _ in findings(trees(), (TREES,), overridden=overridden)] == [blamed]


@pytest.mark.parametrize("broken", [FIRST, SECOND, ("engine", "speculative")])
def test_a_broken_key_is_not_refused_for_its_default(broken: tuple[str, ...]) -> None:
    assert list(findings(trees(), (TREES,), broken=(broken,))) == []


@pytest.mark.parametrize(
    ("mode", "chosen"), [("mixed chunk", True), ("speculation v1", False), ("pipeline", False)]
)
def test_auto_overlaps_where_no_mode_forbids_it(mode: str, chosen: bool) -> None:
    assert overlaps(scenario(mode, engine={"overlap": "auto"})) is chosen


def test_an_explicit_overlap_is_kept() -> None:
    assert overlaps(scenario("overlap"))
    assert not overlaps(scenario())


def test_the_page_lists_every_rule_and_no_other() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "combinations.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert table == [f"| {r.first} | {r.second} | {r.verdict} | {r.reason} |" for r in RULES]
